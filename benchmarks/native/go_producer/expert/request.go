package main

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"slices"
)

const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

// pairs has the two characters of each number of 12 bits, the first in the lower byte.
var pairs = func() (made [1 << 12]uint16) {
	for number := range made {
		made[number] = uint16(alphabet[number>>6]) | uint16(alphabet[number&63])<<8
	}
	return made
}()

var allStored = []byte(`"FailedRecordCount":0,`)

// appendRequest writes the JSON of a PutRecords request.
func appendRequest(body []byte, stream string, entries []entry) []byte {
	body = append(body, `{"StreamName":`...)
	body = append(appendString(body, stream), `,"Records":[`...)
	for position := range entries {
		if position > 0 {
			body = append(body, ',')
		}
		body = append(body, `{"Data":"`...)
		body = append(appendBase64(body, entries[position].data), `","PartitionKey":`...)
		body = append(appendString(body, entries[position].key), '}')
	}
	return append(body, "]}"...)
}

func appendString(body []byte, text string) []byte {
	for position := range len(text) {
		if each := text[position]; each < 0x20 || each > 0x7e || each == '"' || each == '\\' {
			quoted, _ := json.Marshal(text)
			return append(body, quoted...)
		}
	}
	return append(append(append(body, '"'), text...), '"')
}

// appendBase64 encodes six bytes at a time: a load of eight, four look-ups and a store of eight.
func appendBase64(body, data []byte) []byte {
	size := base64.StdEncoding.EncodedLen(len(data))
	body = slices.Grow(body, size)
	written := body[len(body) : len(body)+size]
	for len(data) >= 8 && len(written) >= 8 {
		six := binary.BigEndian.Uint64(data)
		binary.LittleEndian.PutUint64(written, uint64(pairs[six>>52])|uint64(pairs[six>>40&0xfff])<<16|
			uint64(pairs[six>>28&0xfff])<<32|uint64(pairs[six>>16&0xfff])<<48)
		data, written = data[6:], written[8:]
	}
	base64.StdEncoding.Encode(written, data)
	return body[:len(body)+size]
}

// setOutcomes reads the answer of a PutRecords request.
func setOutcomes(entries []entry, answer []byte) {
	if bytes.Contains(answer[:min(len(answer), 64)], allStored) {
		for _, each := range entries {
			each.outcome.isDelivered = true
		}
		return
	}
	var parsed struct{ Records []struct{ ErrorCode string } }
	if json.Unmarshal(answer, &parsed) == nil && len(parsed.Records) == len(entries) {
		for position, each := range parsed.Records {
			entries[position].outcome.isDelivered = each.ErrorCode == ""
		}
	}
}
