// Package trial runs a producer as a rival: it reads a task from standard input (benchmarks/peer_programs/native_rival.py
// describes it), warms up, measures, and prints the figures as one line of JSON.
package trial

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"io"
	"log"
	"net/http"
	"os"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// Task says where to put what.
type Task struct {
	EndpointURL   string `json:"endpoint_url"`
	ControlURL    string `json:"control_url"`
	Certificate   string `json:"certificate"`
	Region        string `json:"region"`
	Stream        string `json:"stream"`
	WarmUpRounds  int    `json:"warm_up_rounds"`
	WarmUpCount   int    `json:"warm_up_count"`
	MeasuredCount int    `json:"measured_count"`
}

// Record is a user record. Each has a string of its own as key.
type Record struct {
	Key  string
	Data []byte
}

// TLS returns the configuration that trusts the task's certificate.
func (t Task) TLS() *tls.Config {
	trusted := x509.NewCertPool()
	if t.Certificate != "" {
		certificate, err := os.ReadFile(t.Certificate)
		Check(err)
		trusted.AppendCertsFromPEM(certificate)
	}
	return &tls.Config{RootCAs: trusted}
}

// Run measures. putAll puts records, waits for their results and returns how many were delivered.
func Run(start func(Task) (putAll func([]Record) int64, versions map[string]string)) {
	input := bufio.NewReaderSize(os.Stdin, 1<<20)
	var task Task
	Check(json.Unmarshal(readPiece(input), &task))
	warmUp, measured := readRecords(input, task.WarmUpCount), readRecords(input, task.MeasuredCount)
	putAll, versions := start(task)
	for range task.WarmUpRounds {
		putAll(warmUp)
	}
	runtime.GC()
	response, err := http.Post(task.ControlURL+"/start", "application/json", strings.NewReader("{}"))
	Check(err)
	response.Body.Close()

	startedAt, before := time.Now(), usage()
	delivered := putAll(measured)
	after, wallSeconds := usage(), time.Since(startedAt).Seconds()

	versions["Go"] = strings.TrimPrefix(runtime.Version(), "go")
	systemSeconds := seconds(after.Stime) - seconds(before.Stime)
	Check(json.NewEncoder(os.Stdout).Encode(map[string]any{
		"acknowledged":   delivered,
		"cpu_seconds":    seconds(after.Utime) - seconds(before.Utime) + systemSeconds,
		"system_seconds": systemSeconds,
		"wall_seconds":   wallSeconds,
		"rss_bytes_peak": after.Maxrss * 1024,
		"versions":       versions,
	}))
}

// Check ends the program with an error.
func Check(err error) {
	if err != nil {
		log.Fatalf("Error: %v", err)
	}
}

func readRecords(input io.Reader, count int) []Record {
	records := make([]Record, count)
	for position := range records {
		records[position] = Record{string(readPiece(input)), readPiece(input)}
	}
	return records
}

func readPiece(input io.Reader) []byte {
	var length uint32
	Check(binary.Read(input, binary.BigEndian, &length))
	piece := make([]byte, length)
	_, err := io.ReadFull(input, piece)
	Check(err)
	return piece
}

func usage() syscall.Rusage {
	var usage syscall.Rusage
	Check(syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return usage
}

func seconds(time syscall.Timeval) float64 { return float64(time.Sec) + float64(time.Usec)/1e6 }
