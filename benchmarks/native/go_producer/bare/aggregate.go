package main

import (
	"bytes"
	"crypto/md5"
	"encoding/binary"
)

const maxAggregateBytes = 51_200

var magic = []byte{0xf3, 0x89, 0x9a, 0xc2}

// Callback gets the result of one user record.
type Callback func(delivered bool)

// Aggregate collects the user records of one shard in the KPL's format: magic, protobuf message, MD5 of the message.
// The message is the partition key table (field 1), then the records (field 3) of {1: key index, 3: data}.
type Aggregate struct {
	keyIndexes map[string]int
	firstKey   string
	keys       []byte
	records    []byte
	callbacks  []Callback
}

func newAggregate() *Aggregate {
	return &Aggregate{
		keyIndexes: make(map[string]int, 512),
		records:    make([]byte, 0, maxAggregateBytes),
		callbacks:  make([]Callback, 0, 512),
	}
}

func (a *Aggregate) isEmpty() bool { return len(a.callbacks) == 0 }

// fits reports whether the aggregated record stays within its maximum with this record, its new key and their lengths.
func (a *Aggregate) fits(key string, data []byte) bool {
	size := len(magic) + len(a.keys) + len(a.records) + md5.Size + len(data) + 14
	if _, isKnown := a.keyIndexes[key]; !isKnown {
		size += len(key) + 3
	}
	return size <= maxAggregateBytes
}

func (a *Aggregate) add(key string, data []byte, callback Callback) {
	index, isKnown := a.keyIndexes[key]
	if !isKnown {
		index = len(a.keyIndexes)
		a.keyIndexes[key] = index
		if index == 0 {
			a.firstKey = key
		}
		a.keys = append(binary.AppendUvarint(append(a.keys, 0x0a), uint64(len(key))), key...)
	}
	bodyBytes := 1 + uvarintBytes(index) + 1 + uvarintBytes(len(data)) + len(data)
	a.records = binary.AppendUvarint(append(a.records, 0x1a), uint64(bodyBytes))
	a.records = binary.AppendUvarint(append(a.records, 0x08), uint64(index))
	a.records = binary.AppendUvarint(append(a.records, 0x1a), uint64(len(data)))
	a.records = append(a.records, data...)
	a.callbacks = append(a.callbacks, callback)
}

// take returns the Kinesis record with its callbacks, and empties the aggregate.
func (a *Aggregate) take() Entry {
	digest := md5.New()
	digest.Write(a.keys)
	digest.Write(a.records)
	data := bytes.Join([][]byte{magic, a.keys, a.records, digest.Sum(nil)}, nil)
	entry := Entry{key: a.firstKey, data: data, callbacks: a.callbacks}
	clear(a.keyIndexes)
	a.keys, a.records = a.keys[:0], a.records[:0]
	a.callbacks = make([]Callback, 0, cap(a.callbacks))
	return entry
}

func uvarintBytes(value int) int {
	size := 1
	for ; value >= 0x80; value >>= 7 {
		size++
	}
	return size
}
