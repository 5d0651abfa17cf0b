package api

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	contract "github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// wires are the ways in which a message comes: content type, and whether it has
// the five bytes of an envelope before it.
var wires = []struct {
	contentType string
	envelope    bool
}{
	{"application/proto", false}, {"application/json", false},
	{"application/connect+proto", true}, {"application/connect+json", true},
	{"application/grpc", true}, {"application/grpc-web+proto", true}, {"application/grpc+json", true},
}

// fuzzPatience is how long a follower follows here. What takes hangs many times
// longer than that hangs.
const fuzzPatience = 5 * time.Millisecond

// FuzzMessages sends any bytes as the message of any method. Whatever comes, it
// ends soon, and in no panic. Run it with -fuzzminimizetime=1x: making every
// finding shorter takes a minute each, in which nothing else is tried.
func FuzzMessages(f *testing.F) {
	procedures := contract.Methods()
	for i := range procedures {
		for _, message := range requests(procedures[i].Procedure) {
			for w, wire := range wires {
				f.Add(uint16(i), uint8(w), enveloped(message, wire.envelope))
			}
		}
		f.Add(uint16(i), uint8(1), []byte(`{"id":"\ud800","type":"mc","tail":-1,"follow":true,"path":"/proc/self/fd"}`))
		f.Add(uint16(i), uint8(1), []byte(strings.Repeat(`{"a":`, 2000)))
		f.Add(uint16(i), uint8(2), []byte{0x02, 0xff, 0xff, 0xff, 0xff})
	}
	r := newRig(f)
	r.applier.texts = map[uint64][]byte{0: []byte("version: v1alpha1"), 1: nil}
	appendTo(f, r.podLog("a_b_c/d/0.log"), "x\n")
	server, err := New(r.opts)
	must(f, err)
	f.Fuzz(func(t *testing.T, method uint16, wire uint8, body []byte) {
		m, w := procedures[int(method)%len(procedures)], wires[int(wire)%len(wires)]
		ctx, cancel := context.WithTimeout(t.Context(), fuzzPatience)
		defer cancel()
		req := httptest.NewRequestWithContext(ctx, http.MethodPost, m.Procedure, bytes.NewReader(body))
		for name, value := range admin {
			req.Header.Set(name, value)
		}
		req.Header.Set("Content-Type", w.contentType)
		res := httptest.NewRecorder()
		began := time.Now()
		server.handler.ServeHTTP(res, req)
		if took := time.Since(began); took > eventually.Scale(30*time.Second) { // a hang, not a wait
			t.Errorf("%s took %s", m.Procedure, took)
		}
		if _, err := io.Copy(io.Discard, res.Body); err != nil {
			t.Error(err)
		}
		for _, line := range r.opts.Logs.Tail(LogID, 0) {
			if strings.Contains(line, "panic in") {
				t.Fatalf("%s: %s", m.Procedure, line)
			}
		}
		if len(server.calls) != 0 || len(server.streams) != 0 {
			t.Fatalf("%s: a place is taken for ever", m.Procedure)
		}
	})
}

// FuzzLogPaths is the same for plain HTTP.
func FuzzLogPaths(f *testing.F) {
	for _, path := range []string{"kubelet", "a/b:d?tail=1", "a/b:d?follow", "..%2f..%2fetc", "a%00b", "?tail=9999999999999", "a//b"} {
		f.Add(path)
	}
	r := newRig(f)
	appendTo(f, r.podLog("a_b_c/d/0.log"), "x\n")
	server, err := New(r.opts)
	must(f, err)
	f.Fuzz(func(t *testing.T, path string) {
		req, err := http.NewRequest(http.MethodGet, host+contract.LogsPath+path, nil)
		if err != nil {
			return // no URL: nothing to send
		}
		ctx, cancel := context.WithTimeout(t.Context(), fuzzPatience)
		defer cancel()
		maps.Copy(req.Header, header(reader))
		res := httptest.NewRecorder()
		defer func() {
			if p := recover(); p != nil && p != http.ErrAbortHandler {
				panic(p)
			}
			if line := strings.Join(r.opts.Logs.Tail(LogID, 0), "\n"); strings.Contains(line, "panic in") {
				t.Fatal(line)
			}
		}()
		server.handler.ServeHTTP(res, req.WithContext(ctx))
	})
}

func header(values map[string]string) http.Header {
	h := http.Header{}
	for name, value := range values {
		h.Set(name, value)
	}
	return h
}

// requests are messages of a method to begin with: empty, and with every field
// set.
func requests(procedure string) [][]byte {
	service, name, _ := strings.Cut(strings.TrimPrefix(procedure, "/"), "/")
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service + "." + name))
	if err != nil {
		return nil
	}
	input := d.(protoreflect.MethodDescriptor).Input()
	typ, err := protoregistry.GlobalTypes.FindMessageByName(input.FullName())
	if err != nil {
		return nil
	}
	full := typ.New()
	for i := range input.Fields().Len() {
		switch field := input.Fields().Get(i); field.Kind() {
		case protoreflect.StringKind:
			if field.IsList() {
				full.Mutable(field).List().Append(protoreflect.ValueOfString("nt"))
				continue
			}
			full.Set(field, protoreflect.ValueOfString("nt"))
		case protoreflect.BytesKind:
			full.Set(field, protoreflect.ValueOfBytes([]byte("version: v1alpha1")))
		case protoreflect.BoolKind:
			full.Set(field, protoreflect.ValueOfBool(true))
		case protoreflect.EnumKind:
			full.Set(field, protoreflect.ValueOfEnum(1))
		}
	}
	message, err := proto.Marshal(full.Interface())
	if err != nil {
		return nil
	}
	if len(message) == 0 {
		return [][]byte{nil}
	}
	return [][]byte{nil, message}
}

func enveloped(message []byte, envelope bool) []byte {
	if !envelope {
		return message
	}
	head := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message)))
	return append(head, message...)
}
