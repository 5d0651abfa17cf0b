package api

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/google/go-cmp/cmp"
)

func TestLogsAreNDJSON(t *testing.T) {
	r := newRig(t)
	w := r.opts.Logs.Writer("etcd")
	fmt.Fprint(w, "one\ntwo <&> \"quoted\"\xff\n")
	appendTo(t, r.podLog("kube-system_kube-apiserver-n1_aaaa/kube-apiserver/0.log"), cri("a")+"\n"+cri("b")+"\n")
	r.serve()
	for path, want := range map[string]string{
		"/v1/logs/etcd":                     "{\"line\":\"one\"}\n{\"line\":\"two <&> \\\"quoted\\\"\uFFFD\"}\n",
		"/v1/logs/etcd?tail=1&follow=false": "{\"line\":\"two <&> \\\"quoted\\\"\uFFFD\"}\n",
		"/v1/logs/etcd?tail=-1":             "",
		"/v1/logs/" + apiserver + "?tail=1": `{"line":"` + cri("b") + "\"}\n",
		"/v1/logs/kube-system%2Fkube-apiserver-n1%3Akube-apiserver?tail=1": `{"line":"` + cri("b") + "\"}\n",
	} {
		res := r.get(reader, path)
		if diff := cmp.Diff(want, res.body); res.StatusCode != http.StatusOK || diff != "" || res.Header.Get("Content-Type") != "application/x-ndjson" {
			t.Errorf("%s: %s %s: %s", path, res.Status, res.Header.Get("Content-Type"), diff)
		}
	}
	for path, want := range map[string]int{
		"/v1/logs/vim":               http.StatusNotFound,
		"/v1/logs/etcd?tail=some":    http.StatusBadRequest,
		"/v1/logs/etcd?boot=last":    http.StatusBadRequest,
		"/v1/logs/etcd?follow=maybe": http.StatusBadRequest,
		"/v1/logs/a/b":               http.StatusBadRequest,
		"/v1/logs/":                  http.StatusNotFound,
	} {
		res := r.get(reader, path)
		if res.StatusCode != want || res.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%s: %s, %s", path, res.Status, res.body)
		}
	}
	if res := r.get(identity(), "/v1/logs/etcd"); res.StatusCode != http.StatusForbidden {
		t.Errorf("without a role: %s %s", res.Status, res.body)
	}
	if res := r.get(nil, "/v1/logs/etcd"); res.StatusCode != http.StatusUnauthorized {
		t.Errorf("not through the gate: %s %s", res.Status, res.body)
	}

	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, host+"/v1/logs/etcd?follow&tail=1", nil)
	must(t, err)
	res, err := r.as(reader).Do(req)
	must(t, err)
	defer res.Body.Close()
	lines := bufio.NewScanner(res.Body)
	lines.Scan()
	fmt.Fprintln(w, "three")
	if lines.Scan(); lines.Text() != `{"line":"three"}` {
		t.Errorf("followed %q, %v", lines.Text(), lines.Err())
	}
}

// stalled is a reader that takes the first piece, and the next one only after
// the log has gone on.
type stalled struct {
	*httptest.ResponseRecorder
	meanwhile func()
}

func (s *stalled) Flush() {
	if s.meanwhile != nil {
		s.meanwhile()
		s.meanwhile = nil
	}
}

func TestNDJSONSaysWhatWasLost(t *testing.T) {
	r := newRig(t)
	server, err := New(r.opts)
	must(t, err)
	w := r.opts.Logs.Writer("chatty")
	fmt.Fprintln(w, "begin")
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Scale(100*time.Millisecond))
	defer cancel()
	req := httptest.NewRequestWithContext(ctx, http.MethodGet, "/v1/logs/chatty?follow", nil)
	for name, value := range reader {
		req.Header.Set(name, value)
	}
	res := &stalled{ResponseRecorder: httptest.NewRecorder(), meanwhile: func() {
		for range 1500 {
			fmt.Fprintln(w, "x")
		}
	}}
	func() {
		defer func() {
			if p := recover(); p != http.ErrAbortHandler { // the end of a test is none of the log
				t.Errorf("got %v", p)
			}
		}()
		server.handler.ServeHTTP(res, req)
	}()
	if body := res.Body.String(); !strings.HasPrefix(body, "{\"line\":\"begin\"}\n{\"lost\":500}\n{\"line\":\"x\"}\n") {
		t.Errorf("got %.100q", body)
	}
}
