package main

import (
	"crypto/md5"
	"encoding/binary"
	"hash"
)

const (
	maxAggregateBytes = 51_200
	maxKeys           = 3_000
	slotCount         = 4_096
)

var magic = []byte{0xf3, 0x89, 0x9a, 0xc2}

// outcome is that of one Kinesis record, shared by the deliveries of its user records.
type outcome struct{ isDelivered bool }

// Delivery is the result of one user record, known after Wait.
type Delivery struct{ outcome *outcome }

// IsDelivered reports whether Kinesis has stored the record.
func (d Delivery) IsDelivered() bool { return d.outcome.isDelivered }

// aggregate collects the user records of one shard in the KPL's format: magic, protobuf message, MD5 of the message.
// The message is the partition key table (field 1), then the records (field 3) of {1: key index, 3: data}.
type aggregate struct {
	head     []byte // the magic and the key table
	records  []byte
	firstKey string
	outcome  *outcome

	// An open-addressed table of key indexes by the keys' digests. A slot of an older generation is free.
	slots      [slotCount]uint32
	digests    [maxKeys]digest
	keyCount   uint32
	generation uint32
	md5        hash.Hash
}

// entry is a Kinesis record that is complete.
type entry struct {
	key     string
	data    []byte
	outcome *outcome
}

func newAggregate() *aggregate {
	a := &aggregate{md5: md5.New(), records: make([]byte, 0, maxAggregateBytes)}
	a.open(make([]byte, 0, maxAggregateBytes))
	return a
}

func (a *aggregate) open(buffer []byte) {
	a.head, a.records = append(buffer[:0], magic...), a.records[:0]
	a.outcome, a.keyCount = &outcome{}, 0
	a.generation++
	if a.generation == 1<<16 {
		a.slots, a.generation = [slotCount]uint32{}, 1
	}
}

// slotOf returns the slot of a key, and its index if the slot is taken.
func (a *aggregate) slotOf(wanted digest) (slot *uint32, index uint32, isKnown bool) {
	for position := wanted.low; ; position++ {
		slot = &a.slots[position%slotCount]
		if *slot>>16 != a.generation {
			return slot, a.keyCount, false
		}
		if index = *slot & 0xffff; a.digests[index] == wanted {
			return slot, index, true
		}
	}
}

// add returns false if the aggregate has no place for the record.
func (a *aggregate) add(key string, keyDigest digest, data []byte) bool {
	slot, index, isKnown := a.slotOf(keyDigest)
	size := len(a.head) + len(a.records) + md5.Size + len(data) + 14
	if !isKnown {
		size += len(key) + 3
	}
	if len(a.records) > 0 && (size > maxAggregateBytes || a.keyCount == maxKeys) {
		return false
	}
	if !isKnown {
		if index == 0 {
			a.firstKey = key
		}
		*slot = a.generation<<16 | index
		a.digests[index] = keyDigest
		a.keyCount++
		a.head = append(binary.AppendUvarint(append(a.head, 0x0a), uint64(len(key))), key...)
	}
	bodyBytes := 2 + uvarintBytes(int(index)) + uvarintBytes(len(data)) + len(data)
	a.records = binary.AppendUvarint(append(a.records, 0x1a), uint64(bodyBytes))
	a.records = binary.AppendUvarint(append(a.records, 0x08), uint64(index))
	a.records = binary.AppendUvarint(append(a.records, 0x1a), uint64(len(data)))
	a.records = append(a.records, data...)
	return true
}

// take returns the Kinesis record, and opens the aggregate with another buffer.
func (a *aggregate) take(buffer []byte) entry {
	data := append(a.head, a.records...)
	a.md5.Reset()
	a.md5.Write(data[len(magic):])
	taken := entry{key: a.firstKey, data: a.md5.Sum(data), outcome: a.outcome}
	a.open(buffer)
	return taken
}

func uvarintBytes(value int) int {
	size := 1
	for ; value >= 0x80; value >>= 7 {
		size++
	}
	return size
}
