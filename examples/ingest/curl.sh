#!/usr/bin/env bash
# Every encoding and option of POST /v1/streams/{stream}/records.
#
#     kpl serve --local &
#     examples/ingest/curl.sh
#
# GATEWAY is its address. KPL_KEY is a tenant's key, if the gateway checks credentials.
set -euo pipefail

gateway=${GATEWAY:-http://127.0.0.1:8080}
records=$gateway/v1/streams/${STREAM:-demo}/records
post=(curl --silent --show-error --fail-with-body --write-out '\n' --request POST)
if [ -n "${KPL_KEY:-}" ]; then post+=(--header "Authorization: Bearer $KPL_KEY"); fi

echo 'one record, acknowledged from memory:'
"${post[@]}" "$records" --header 'Content-Type: application/json' --data '{"partition_key": "42", "data": "hello"}'

echo 'several records of any JSON type, acknowledged by Kinesis:'
"${post[@]}" "$records?ack=delivered" --header 'Content-Type: application/json' \
    --data '{"records": [{"partition_key": "42", "data": {"total": 12}}, {"partition_key": "43", "data": [1, 2, 3]}]}'

echo 'bytes, in Base64:'
"${post[@]}" "$records" --header 'Content-Type: application/json' \
    --data '{"partition_key": "42", "data_base64": "aGVsbG8="}'

echo 'one record per line, compressed:'
printf '{"partition_key": "%s", "data": "line"}\n' 1 2 3 | gzip |
    "${post[@]}" "$records" --header 'Content-Type: application/x-ndjson' --header 'Content-Encoding: gzip' --data-binary @-

echo 'the body as the data, with its key in a header:'
printf '\x00\x01\x02' |
    "${post[@]}" "$records" --header 'Content-Type: application/octet-stream' --header 'X-Partition-Key: 42' --data-binary @-

echo 'sent twice, put once (with several workers on one connection only):'
key=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
for _ in 1 2; do
    "${post[@]}" "$records?ack=delivered" --header "Idempotency-Key: \"$key\"" --header 'Content-Type: application/json' \
        --data '{"partition_key": "42", "data": "once"}'
done

echo 'accept the valid records and report the invalid ones:'
printf '{"partition_key": "1", "data": "good"}\n{"partition_key": "2"}\n' |
    "${post[@]}" "$records?partial=true" --header 'Content-Type: application/x-ndjson' --data-binary @-
