// A Kinesis producer as an expert writes it, with the standard library only: the same aggregation as the bare producer,
// and everything between a put and the socket written for it.
package main

import (
	"runtime/debug"

	"benchmark/go_producer/trial"
)

// The live heap is small beside the records of the task.
const gcPercent = 400

func main() { trial.Run(start) }

func start(task trial.Task) (func([]trial.Record) int64, map[string]string) {
	debug.SetGCPercent(gcPercent)
	producer, err := newProducer(task)
	trial.Check(err)
	return func(records []trial.Record) int64 { return putAll(producer, records) }, map[string]string{}
}

func putAll(producer *Producer, records []trial.Record) int64 {
	deliveries := make([]Delivery, len(records))
	for position := range records {
		deliveries[position] = producer.Put(records[position].Key, records[position].Data)
	}
	producer.Flush()
	producer.Wait()
	var delivered int64
	for _, delivery := range deliveries {
		if delivery.IsDelivered() {
			delivered++
		}
	}
	return delivered
}
