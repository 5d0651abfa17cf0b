package operationtest

import (
	"context"
	"log/slog"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

// Dark is the value of Node.Cut while the node has no power.
const Dark = "dark"

// Node runs an operation in a bubble of testing/synctest, over power failures.
type Node struct {
	T      *testing.T
	Dir    string
	Shared Memory
	Runner *operation.Runner
	Off    func() // ends the boot that is

	Restart Restart

	// Mu guards all following fields, and those of the cluster.
	Mu  sync.Mutex
	Did []string
	Cut string // the node loses its power when this is done

	power context.CancelFunc
}

// Boot is a start of the node.
func (n *Node) Boot(store *resource.Store, d operation.Definition) {
	n.T.Helper()
	runner, err := operation.New(operation.Options{
		Store: store, Log: slog.New(slog.DiscardHandler), Dir: n.Dir, Shared: &n.Shared, Definitions: []operation.Definition{d},
	})
	Put(n.T, err)
	ctx, cancel := context.WithCancel(n.T.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = runner.Run(ctx) }()
	n.Runner, n.power = runner, cancel
	n.Off = func() { cancel(); <-ended }
	runner.Open()
	synctest.Wait()
}

// Note writes down a change; the power goes with the one that is to be cut. The caller holds Mu.
func (n *Node) Note(what string) {
	n.Did = append(n.Did, what)
	if n.Cut == what {
		n.Cut = Dark
		n.power()
	}
}

// Start asks for an operation.
func (n *Node) Start(name string, arguments any) (operation.Operation, error) {
	return n.Runner.Start(n.T.Context(), operation.Ask{Name: name, Arguments: arguments, By: "jo"})
}

// End follows an operation to its end, over power failures after which boot is called, and answers its questions; "" is
// no answer.
func (n *Node) End(id string, boot func(), answer func(question string) string) operation.Operation {
	n.T.Helper()
	for range 30000 {
		time.Sleep(time.Second)
		synctest.Wait()
		n.Mu.Lock()
		dark := n.Cut == Dark
		n.Mu.Unlock()
		if dark {
			n.Off()
			n.Mu.Lock()
			n.Cut = ""
			n.Mu.Unlock()
			boot()
		}
		o, err := n.Runner.Get(id)
		Put(n.T, err)
		if !o.Ended.IsZero() {
			return o
		}
		if o.Question == nil {
			continue
		}
		if text := answer(o.Question.ID); text != "" {
			Put(n.T, n.Runner.Answer(id, o.Question.ID, text, "jo"))
		}
	}
	o, _ := n.Runner.Get(id)
	n.T.Fatalf("%s doesn't end: %+v", id, o)
	return o
}

// Kubernetes makes clients of an API server.
func Kubernetes(server http.RoundTripper) func() (*kubeclient.Client, error) {
	return func() (*kubeclient.Client, error) {
		return kubeclient.New(kubeclient.Options{Server: "https://api", Transport: server})
	}
}

// Put ends a test with an error.
func Put(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
