// A bare Kinesis producer: aggregation in the KPL's format with the AWS SDK, and nothing else.
//
// It reads its task from standard input (benchmarks/peer_programs/native_rival.py describes it), warms up, measures,
// and prints its figures as one line of JSON.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"io"
	"log"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/kinesis"
)

const sdk = "github.com/aws/aws-sdk-go-v2/service/kinesis"

type task struct {
	EndpointURL   string `json:"endpoint_url"`
	ControlURL    string `json:"control_url"`
	Certificate   string `json:"certificate"`
	Region        string `json:"region"`
	Stream        string `json:"stream"`
	WarmUpRounds  int    `json:"warm_up_rounds"`
	WarmUpCount   int    `json:"warm_up_count"`
	MeasuredCount int    `json:"measured_count"`
}

type record struct {
	key  string
	data []byte
}

func main() {
	input := bufio.NewReaderSize(os.Stdin, 1<<20)
	var task task
	check(json.Unmarshal(readPiece(input), &task))
	warmUp, measured := readRecords(input, task.WarmUpCount), readRecords(input, task.MeasuredCount)
	producer, err := newProducer(newClient(task), task.Stream)
	check(err)
	for range task.WarmUpRounds {
		putAll(producer, warmUp)
	}
	runtime.GC()
	response, err := http.Post(task.ControlURL+"/start", "application/json", strings.NewReader("{}"))
	check(err)
	response.Body.Close()

	startedAt, before := time.Now(), usage()
	delivered := putAll(producer, measured)
	after, wallSeconds := usage(), time.Since(startedAt).Seconds()

	systemSeconds := seconds(after.Stime) - seconds(before.Stime)
	check(json.NewEncoder(os.Stdout).Encode(map[string]any{
		"acknowledged":   delivered,
		"cpu_seconds":    seconds(after.Utime) - seconds(before.Utime) + systemSeconds,
		"system_seconds": systemSeconds,
		"wall_seconds":   wallSeconds,
		"rss_bytes_peak": after.Maxrss * 1024,
		"versions":       versions(),
	}))
}

func newClient(task task) *kinesis.Client {
	trusted := x509.NewCertPool()
	if task.Certificate != "" {
		certificate, err := os.ReadFile(task.Certificate)
		check(err)
		trusted.AppendCertsFromPEM(certificate)
	}
	transport := &http.Transport{
		MaxConnsPerHost:     connectionCount,
		MaxIdleConnsPerHost: connectionCount,
		TLSClientConfig:     &tls.Config{RootCAs: trusted},
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

func putAll(producer *Producer, records []record) int64 {
	var delivered atomic.Int64
	callback := func(isDelivered bool) {
		if isDelivered {
			delivered.Add(1)
		}
	}
	for _, record := range records {
		producer.Put(record.key, record.data, callback)
	}
	producer.Flush()
	producer.Wait()
	return delivered.Load()
}

func readRecords(input io.Reader, count int) []record {
	records := make([]record, count)
	for position := range records {
		records[position] = record{string(readPiece(input)), readPiece(input)}
	}
	return records
}

func readPiece(input io.Reader) []byte {
	var length uint32
	check(binary.Read(input, binary.BigEndian, &length))
	piece := make([]byte, length)
	_, err := io.ReadFull(input, piece)
	check(err)
	return piece
}

func versions() map[string]string {
	found := map[string]string{"Go": strings.TrimPrefix(runtime.Version(), "go")}
	if information, isKnown := debug.ReadBuildInfo(); isKnown {
		for _, module := range information.Deps {
			if module.Path == sdk {
				found["aws-sdk-go-v2/service/kinesis"] = strings.TrimPrefix(module.Version, "v")
			}
		}
	}
	return found
}

func usage() syscall.Rusage {
	var usage syscall.Rusage
	check(syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return usage
}

func seconds(time syscall.Timeval) float64 { return float64(time.Sec) + float64(time.Usec)/1e6 }

func check(err error) {
	if err != nil {
		log.Fatalf("Error: %v", err)
	}
}
