// Puts records with AWS' SDK for JavaScript through a gateway and prints what it was answered.
//
// argv:   endpoint, stream, access key id, secret, session token or '', seconds the clock is wrong by, number of records
// HTTP_VERSION in the environment: '1.1' for a client that is configured for it.
// stdout: one JSON object per record in order, {shardId, sequenceNumber} or {errorCode}; or, if a call is refused,
//         one line {code, status}.
'use strict';
const { KinesisClient, PutRecordsCommand, DescribeStreamSummaryCommand, ListShardsCommand } = require('@aws-sdk/client-kinesis');
const { NodeHttpHandler } = require('@smithy/node-http-handler');

const [endpoint, StreamName, accessKeyId, secretAccessKey, sessionToken, skewSeconds, count] = process.argv.slice(2);
const PER_REQUEST = 500;

const client = new KinesisClient({
  endpoint,
  region: 'eu-west-1',
  credentials: { accessKeyId, secretAccessKey, ...(sessionToken ? { sessionToken } : {}) },
  systemClockOffset: Number(skewSeconds) * 1000,
  maxAttempts: 1, // a second attempt would correct the clock
  // By default this client speaks HTTP/2.
  ...(process.env.HTTP_VERSION === '1.1' ? { requestHandler: new NodeHttpHandler() } : {}),
});

async function main() {
  const summary = await client.send(new DescribeStreamSummaryCommand({ StreamName }));
  const shards = await client.send(new ListShardsCommand({ StreamName }));
  if (summary.StreamDescriptionSummary.OpenShardCount !== shards.Shards.length) throw new Error('shards do not agree');
  const numbers = Array.from({ length: Number(count) }, (_, number) => number);
  for (let start = 0; start < numbers.length; start += PER_REQUEST) {
    let waiting = numbers.slice(start, start + PER_REQUEST);
    const answers = new Map();
    for (let again = false; waiting.length > 0; again = true) {
      if (again) await new Promise((goOn) => setTimeout(goOn, 50)); // as a caller backs off
      const Records = waiting.map((number) => ({ PartitionKey: `js-${number}`, Data: Buffer.from(`js-${number}`) }));
      const answer = await client.send(new PutRecordsCommand({ StreamName, Records }));
      waiting.forEach((number, index) => answers.set(number, answer.Records[index]));
      waiting = waiting.filter((number) => answers.get(number).ErrorCode); // as the documentation says: send those again
    }
    for (const number of numbers.slice(start, start + PER_REQUEST)) {
      const { ShardId, SequenceNumber } = answers.get(number);
      process.stdout.write(`${JSON.stringify({ shardId: ShardId, sequenceNumber: SequenceNumber })}\n`);
    }
  }
}

main().catch((error) => {
  process.stdout.write(`${JSON.stringify({ code: error.name, status: error.$metadata?.httpStatusCode ?? 0 })}\n`);
  process.stderr.write(`${error.stack}\n`);
}).finally(() => client.destroy());
