// De-aggregates with the npm package aws-kinesis-agg.
//
// stdin:  one JSON object per line, {partitionKey, sequenceNumber, data (base64)}
// stdout: one JSON array per input line, in order, of {partitionKey, explicitHashKey, data, aggregated};
//         {error} in place of the array for a record the package refuses.
'use strict';
const readline = require('node:readline');
const { deaggregateSync } = require('aws-kinesis-agg');

function deaggregate(record) {
  let answer = null;
  deaggregateSync(record, true, (error, userRecords) => {
    if (answer !== null) return; // after a bad record the package calls back twice: the first call tells
    answer = error
      ? { error: String(error.message || error) }
      : userRecords.map((userRecord) => ({
          partitionKey: userRecord.partitionKey,
          explicitHashKey: userRecord.explicitPartitionKey ?? null,
          data: userRecord.data,
          aggregated: userRecord.subSequenceNumber !== undefined,
        }));
  });
  return answer;
}

readline.createInterface({ input: process.stdin, crlfDelay: Infinity }).on('line', (line) => {
  if (line !== '') process.stdout.write(`${JSON.stringify(deaggregate(JSON.parse(line)))}\n`);
});
