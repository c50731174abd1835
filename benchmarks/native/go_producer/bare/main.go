// A bare Kinesis producer: aggregation in the KPL's format with the AWS SDK, and nothing else.
package main

import (
	"context"
	"crypto/tls"
	"net/http"
	"os"
	"runtime/debug"
	"strings"
	"sync/atomic"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/kinesis"

	"benchmark/go_producer/trial"
)

const sdk = "github.com/aws/aws-sdk-go-v2/service/kinesis"

func main() { trial.Run(start) }

func start(task trial.Task) (func([]trial.Record) int64, map[string]string) {
	producer, err := newProducer(newClient(task), task.Stream)
	trial.Check(err)
	return func(records []trial.Record) int64 { return putAll(producer, records) }, versions()
}

func newClient(task trial.Task) *kinesis.Client {
	transport := &http.Transport{
		MaxConnsPerHost:     connectionCount,
		MaxIdleConnsPerHost: connectionCount,
		TLSClientConfig:     task.TLS(),
		TLSNextProto:        map[string]func(string, *tls.Conn) http.RoundTripper{}, // HTTP/1.1 only
	}
	credentials := aws.Credentials{
		AccessKeyID: os.Getenv("AWS_ACCESS_KEY_ID"), SecretAccessKey: os.Getenv("AWS_SECRET_ACCESS_KEY"),
	}
	provider := func(context.Context) (aws.Credentials, error) { return credentials, nil }
	return kinesis.New(kinesis.Options{
		BaseEndpoint:     &task.EndpointURL,
		Region:           task.Region,
		Credentials:      aws.NewCredentialsCache(aws.CredentialsProviderFunc(provider)),
		HTTPClient:       &http.Client{Transport: transport},
		RetryMaxAttempts: 1,
	})
}

func putAll(producer *Producer, records []trial.Record) int64 {
	var delivered atomic.Int64
	callback := func(isDelivered bool) {
		if isDelivered {
			delivered.Add(1)
		}
	}
	for _, record := range records {
		producer.Put(record.Key, record.Data, callback)
	}
	producer.Flush()
	producer.Wait()
	return delivered.Load()
}

func versions() map[string]string {
	found := map[string]string{}
	if information, isKnown := debug.ReadBuildInfo(); isKnown {
		for _, module := range information.Deps {
			if module.Path == sdk {
				found["aws-sdk-go-v2/service/kinesis"] = strings.TrimPrefix(module.Version, "v")
			}
		}
	}
	return found
}
