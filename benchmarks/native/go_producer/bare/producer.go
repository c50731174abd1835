package main

import (
	"context"
	"crypto/md5"
	"encoding/binary"
	"math/big"
	"sort"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/kinesis"
	"github.com/aws/aws-sdk-go-v2/service/kinesis/types"
)

const (
	connectionCount   = 24
	maxRequestEntries = 500
	maxRequestBytes   = 1 << 20
	flushInterval     = 50 * time.Millisecond
)

// Entry is one Kinesis record of a request, with the callbacks of its user records.
type Entry struct {
	key       string
	data      []byte
	callbacks []Callback
}

// hashKey is a number of 128 bits.
type hashKey struct{ high, low uint64 }

// Producer aggregates by shard and sends on 24 connections.
// It has no retry, limiter, time to live or wrong-shard check.
type Producer struct {
	client *kinesis.Client
	stream string
	ends   []hashKey // the last hash key of each shard, ascending

	mutex        sync.Mutex
	aggregates   []*Aggregate
	entries      []Entry
	entriesBytes int

	requests chan []Entry
	unsent   sync.WaitGroup
}

func newProducer(client *kinesis.Client, stream string) (*Producer, error) {
	producer := &Producer{client: client, stream: stream, requests: make(chan []Entry)}
	shards, err := client.ListShards(context.Background(), &kinesis.ListShardsInput{StreamName: &stream})
	if err != nil {
		return nil, err
	}
	for _, shard := range shards.Shards {
		end, _ := new(big.Int).SetString(*shard.HashKeyRange.EndingHashKey, 10)
		digest := [16]byte{}
		end.FillBytes(digest[:])
		producer.ends = append(producer.ends, hashKeyOf(digest))
		producer.aggregates = append(producer.aggregates, newAggregate())
	}
	sort.Slice(producer.ends, func(i, j int) bool { return isLess(producer.ends[i], producer.ends[j]) })
	for range connectionCount {
		go producer.send()
	}
	go func() {
		for range time.Tick(flushInterval) {
			producer.Flush()
		}
	}()
	return producer, nil
}

// Put adds a user record. It blocks while all connections are busy and a request is full.
func (p *Producer) Put(key string, data []byte, callback Callback) {
	shard := p.shardOf(key)
	p.mutex.Lock()
	defer p.mutex.Unlock()
	aggregate := p.aggregates[shard]
	if !aggregate.isEmpty() && !aggregate.fits(key, data) {
		p.enqueue(aggregate.take())
	}
	aggregate.add(key, data, callback)
}

// Flush sends everything that has been put.
func (p *Producer) Flush() {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for _, aggregate := range p.aggregates {
		if !aggregate.isEmpty() {
			p.enqueue(aggregate.take())
		}
	}
	p.sendRequest()
}

// Wait returns when every request has been answered.
func (p *Producer) Wait() { p.unsent.Wait() }

func (p *Producer) enqueue(entry Entry) {
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

func (p *Producer) send() {
	for entries := range p.requests {
		records := make([]types.PutRecordsRequestEntry, len(entries))
		for position, entry := range entries {
			records[position] = types.PutRecordsRequestEntry{Data: entry.data, PartitionKey: aws.String(entry.key)}
		}
		input := &kinesis.PutRecordsInput{StreamName: &p.stream, Records: records}
		output, err := p.client.PutRecords(context.Background(), input)
		for position, entry := range entries {
			delivered := err == nil && output.Records[position].ErrorCode == nil
			for _, callback := range entry.callbacks {
				callback(delivered)
			}
		}
		p.unsent.Done()
	}
}

func (p *Producer) shardOf(key string) int {
	wanted := hashKeyOf(md5.Sum([]byte(key)))
	return sort.Search(len(p.ends), func(i int) bool { return !isLess(p.ends[i], wanted) })
}

func hashKeyOf(digest [16]byte) hashKey {
	return hashKey{binary.BigEndian.Uint64(digest[:8]), binary.BigEndian.Uint64(digest[8:])}
}

func isLess(a, b hashKey) bool { return a.high < b.high || a.high == b.high && a.low < b.low }
