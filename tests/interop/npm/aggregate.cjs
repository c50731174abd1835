// Aggregates with the npm package aws-kinesis-agg.
//
// stdin:  a JSON array of {partitionKey, data (base64)}; keys must not look like array indices, because the
//         package keeps them as an object's property names, which JavaScript sorts to the front
// stdout: the aggregated record in base64
'use strict';
const { readFileSync } = require('node:fs');
const { RecordAggregator } = require('aws-kinesis-agg');

const aggregator = new RecordAggregator();
for (const { partitionKey, data } of JSON.parse(readFileSync(0, 'utf8'))) {
  aggregator.addUserRecord({ partitionKey, data: Buffer.from(data, 'base64') });
}
process.stdout.write(aggregator.build().data.toString('base64'));
