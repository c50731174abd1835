package main

import (
	"crypto/md5"
	"encoding/binary"
	"encoding/json"
	"math/big"
	"slices"
	"sync"
	"time"
	"unsafe"

	"benchmark/go_producer/trial"
)

const (
	maxRequestEntries = 500
	maxRequestBytes   = 1 << 20
	flushInterval     = 50 * time.Millisecond
	// More requests at a time only use more memory.
	connectionCount = 8
)

// digest is a hash key, a number of 128 bits.
type digest struct{ high, low uint64 }

// Producer aggregates by shard and sends on eight connections.
// It has no retry, limiter, time to live or wrong-shard check.
type Producer struct {
	ends []digest // the last hash key of each shard, ascending

	mutex        sync.Mutex
	aggregates   []*aggregate
	entries      []entry
	entriesBytes int

	buffers     sync.Pool
	connections stack
	requests    chan []entry
	unsent      sync.WaitGroup
}

// stack has the idle connections: the one used last is used next, so few are opened while few are needed.
type stack struct {
	mutex sync.Mutex
	idle  []*connection
}

func (s *stack) take() *connection {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	last := len(s.idle) - 1
	taken := s.idle[last]
	s.idle = s.idle[:last]
	return taken
}

func (s *stack) put(connection *connection) {
	s.mutex.Lock()
	s.idle = append(s.idle, connection)
	s.mutex.Unlock()
}

func newProducer(task trial.Task) (*Producer, error) {
	producer := &Producer{requests: make(chan []entry)}
	producer.buffers.New = func() any { return make([]byte, 0, maxAggregateBytes) }
	if err := producer.listShards(newConnection(task), task.Stream); err != nil {
		return nil, err
	}
	for range connectionCount {
		producer.connections.put(newConnection(task))
		go producer.send(task.Stream)
	}
	go func() {
		for range time.Tick(flushInterval) {
			producer.Flush()
		}
	}()
	return producer, nil
}

func (p *Producer) listShards(connection *connection, stream string) error {
	body, _ := json.Marshal(map[string]string{"StreamName": stream})
	answer, err := connection.call("ListShards", body)
	if err != nil {
		return err
	}
	var listed struct {
		Shards []struct {
			HashKeyRange struct{ EndingHashKey string }
		}
	}
	if err := json.Unmarshal(answer, &listed); err != nil {
		return err
	}
	for _, shard := range listed.Shards {
		end, _ := new(big.Int).SetString(shard.HashKeyRange.EndingHashKey, 10)
		bytes := [md5.Size]byte{}
		end.FillBytes(bytes[:])
		p.ends = append(p.ends, digestOf(bytes))
		p.aggregates = append(p.aggregates, newAggregate())
	}
	slices.SortFunc(p.ends, func(a, b digest) int {
		if isLess(a, b) {
			return -1
		}
		return 1
	})
	return nil
}

// Put adds a user record. It blocks while all connections are busy and a request is full.
func (p *Producer) Put(key string, data []byte) Delivery {
	keyDigest := digestOf(md5.Sum(unsafe.Slice(unsafe.StringData(key), len(key))))
	p.mutex.Lock()
	aggregate := p.aggregates[p.shardOf(keyDigest)]
	if !aggregate.add(key, keyDigest, data) {
		p.enqueue(aggregate.take(p.buffers.Get().([]byte)))
		aggregate.add(key, keyDigest, data)
	}
	delivery := Delivery{aggregate.outcome}
	p.mutex.Unlock()
	return delivery
}

// Flush sends everything that has been put.
func (p *Producer) Flush() {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for _, aggregate := range p.aggregates {
		if len(aggregate.records) > 0 {
			p.enqueue(aggregate.take(p.buffers.Get().([]byte)))
		}
	}
	p.sendRequest()
}

// Wait returns when every request has been answered.
func (p *Producer) Wait() { p.unsent.Wait() }

func (p *Producer) enqueue(entry entry) {
	size := len(entry.key) + len(entry.data)
	if len(p.entries) == maxRequestEntries || p.entriesBytes+size > maxRequestBytes {
		p.sendRequest()
	}
	p.entries = append(p.entries, entry)
	p.entriesBytes += size
}

func (p *Producer) sendRequest() {
	if len(p.entries) > 0 {
		p.unsent.Add(1)
		p.requests <- p.entries
		p.entries, p.entriesBytes = nil, 0
	}
}

func (p *Producer) send(stream string) {
	for entries := range p.requests {
		connection := p.connections.take()
		connection.body = appendRequest(connection.body[:0], stream, entries)
		answer, err := connection.call("PutRecords", connection.body)
		if err == nil {
			setOutcomes(entries, answer)
		}
		p.connections.put(connection)
		for _, each := range entries {
			p.buffers.Put(each.data[:0])
		}
		p.unsent.Done()
	}
}

// shardOf returns the position of the first shard whose last hash key is not below the digest.
func (p *Producer) shardOf(wanted digest) int {
	first, count := 0, len(p.ends)
	for count > 0 {
		half := count / 2
		if isLess(p.ends[first+half], wanted) {
			first, count = first+half+1, count-half-1
		} else {
			count = half
		}
	}
	return first
}

func digestOf(bytes [md5.Size]byte) digest {
	return digest{binary.BigEndian.Uint64(bytes[:8]), binary.BigEndian.Uint64(bytes[8:])}
}

func isLess(a, b digest) bool { return a.high < b.high || a.high == b.high && a.low < b.low }
