package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// recording has answers of the API of a real node: a test of package services writes
// them, and fails when the node answers something else.
var recording = sync.OnceValues(func() (r struct{ Calls, Operations map[string]json.RawMessage }, err error) {
	text, err := os.ReadFile(filepath.Join(sources, "testdata", "node.json"))
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	return r, err
})

// consoleLines are what a real node writes to its console while it labels itself: a test
// of package controlplane compares them.
func consoleLines() ([]string, error) {
	text, err := os.ReadFile(filepath.Join(sources, "testdata", "console.log"))
	return strings.Split(strings.TrimSpace(string(text)), "\n"), err
}

// sources is the folder of this package: scripts run in folders of their own.
var sources = func() string {
	dir, err := os.Getwd()
	if err != nil {
		panic(err)
	}
	return dir
}()

// replay answers a request as a real node does.
func replay[M any](procedure string, request proto.Message) (*connect.Response[M], error) {
	r, err := recording()
	if err != nil {
		return nil, err
	}
	text, err := protojson.Marshal(request)
	if err != nil {
		return nil, err
	}
	var key bytes.Buffer
	if err := json.Compact(&key, text); err != nil {
		return nil, err
	}
	answer, ok := r.Calls[procedure+" "+key.String()]
	if !ok {
		return nil, connect.NewError(connect.CodeInternal, fmt.Errorf("%s %s isn't recorded: add it to recordedCalls in package services", procedure, &key))
	}
	var failed struct {
		Code    connect.Code
		Message string
	}
	if json.Unmarshal(answer, &failed) == nil && failed.Code != 0 {
		return nil, connect.NewError(failed.Code, errors.New(failed.Message))
	}
	m := new(M)
	return connect.NewResponse(m), protojson.Unmarshal(answer, any(m).(proto.Message))
}

// recordedOperation is an operation with the steps that a real node takes.
func recordedOperation(name string) (*apiv1.Operation, error) {
	r, err := recording()
	if err != nil {
		return nil, err
	}
	o := &apiv1.Operation{}
	return o, protojson.Unmarshal(r.Operations[name], o)
}

// What these tests make up has the names of a real node, too.
func TestNamesAreReal(t *testing.T) {
	t.Parallel()
	pages, err := os.ReadFile("../../docs/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range findings {
		if !bytes.Contains(pages, []byte("\n### "+f.Id+"\n")) {
			t.Errorf("the doctor knows no %s", f.Id)
		}
	}
	m, err := replay[apiv1.ListServicesResponse]("ServiceService/List", &apiv1.ListServicesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range waitingNode(0).services.Services {
		if !slices.ContainsFunc(m.Msg.Services, func(real *apiv1.Service) bool { return real.Id == s.Id }) {
			t.Errorf("there is no service %s", s.Id)
		}
	}
}
