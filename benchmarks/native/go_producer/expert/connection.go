package main

import (
	"bufio"
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strconv"
	"time"

	"benchmark/go_producer/trial"
)

const (
	contentType   = "application/x-amz-json-1.1"
	signedHeaders = "content-type;host;x-amz-date;x-amz-target"
	service       = "kinesis"
)

// connection sends signed requests one after the other over HTTP/1.1, and connects again after an error.
type connection struct {
	task   trial.Task
	url    *url.URL
	socket net.Conn
	reader *bufio.Reader
	head   []byte
	body   []byte
	answer []byte

	day        string
	signingKey []byte
}

func newConnection(task trial.Task) *connection {
	parsed, err := url.Parse(task.EndpointURL)
	trial.Check(err)
	return &connection{task: task, url: parsed, body: make([]byte, 0, maxRequestBytes*3/2)}
}

// call returns the body of the answer, which the next call overwrites.
func (c *connection) call(operation string, body []byte) ([]byte, error) {
	answer, err := c.exchange(operation, body)
	if err != nil && c.socket != nil {
		c.socket.Close()
		c.socket = nil
	}
	return answer, err
}

func (c *connection) exchange(operation string, body []byte) ([]byte, error) {
	if err := c.connect(); err != nil {
		return nil, err
	}
	c.writeHead(operation, body)
	if _, err := c.socket.Write(c.head); err != nil {
		return nil, err
	}
	if _, err := c.socket.Write(body); err != nil {
		return nil, err
	}
	return c.read()
}

func (c *connection) connect() error {
	if c.socket != nil {
		return nil
	}
	var err error
	if c.url.Scheme == "https" {
		config := c.task.TLS()
		config.DynamicRecordSizingDisabled = true
		c.socket, err = tls.Dial("tcp", c.url.Host, config)
	} else {
		c.socket, err = net.Dial("tcp", c.url.Host)
	}
	if err != nil {
		c.socket = nil
		return err
	}
	c.reader = bufio.NewReaderSize(c.socket, 1<<15)
	return nil
}

// writeHead writes the request's head with a signature of version 4.
func (c *connection) writeHead(operation string, body []byte) {
	now := time.Now().UTC().Format("20060102T150405Z")
	day := now[:8]
	scope := day + "/" + c.task.Region + "/" + service + "/aws4_request"
	if day != c.day {
		key := signed([]byte("AWS4"+os.Getenv("AWS_SECRET_ACCESS_KEY")), day)
		for _, part := range []string{c.task.Region, service, "aws4_request"} {
			key = signed(key, part)
		}
		c.day, c.signingKey = day, key
	}
	bodyDigest := sha256.Sum256(body)
	target := "Kinesis_20131202." + operation
	canonical := sha256.Sum256(fmt.Appendf(nil, "POST\n/\n\ncontent-type:%s\nhost:%s\nx-amz-date:%s\nx-amz-target:%s\n\n%s\n%x",
		contentType, c.url.Host, now, target, signedHeaders, bodyDigest))
	signature := signed(c.signingKey, "AWS4-HMAC-SHA256\n"+now+"\n"+scope+"\n"+hex.EncodeToString(canonical[:]))
	c.head = fmt.Appendf(c.head[:0], "POST / HTTP/1.1\r\nHost: %s\r\nContent-Type: %s\r\nX-Amz-Date: %s\r\nX-Amz-Target: %s\r\n"+
		"Authorization: AWS4-HMAC-SHA256 Credential=%s/%s, SignedHeaders=%s, Signature=%x\r\nContent-Length: %d\r\n\r\n",
		c.url.Host, contentType, now, target, os.Getenv("AWS_ACCESS_KEY_ID"), scope, signedHeaders, signature, len(body))
}

func signed(key []byte, text string) []byte {
	made := hmac.New(sha256.New, key)
	made.Write([]byte(text))
	return made.Sum(nil)
}

// read returns the body of an answer with status 200 and a Content-Length.
func (c *connection) read() ([]byte, error) {
	line, err := c.reader.ReadSlice('\n')
	if err != nil {
		return nil, err
	}
	isGood, length := bytes.HasPrefix(line, []byte("HTTP/1.1 200 ")), -1
	for {
		line, err = c.reader.ReadSlice('\n')
		if err != nil {
			return nil, err
		}
		line = bytes.TrimSpace(line)
		if len(line) == 0 {
			break
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		if bytes.EqualFold(name, []byte("content-length")) {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(value))); err != nil {
				return nil, err
			}
		}
	}
	if !isGood || length < 0 {
		return nil, errors.New("an answer that is not 200 or has no length")
	}
	if cap(c.answer) < length {
		c.answer = make([]byte, length)
	}
	c.answer = c.answer[:length]
	_, err = io.ReadFull(c.reader, c.answer)
	return c.answer, err
}
