package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/qemu"
)

// Budgets of the machine API, as docs/design.md has them.
const (
	budgetAPI     = 15 * time.Second // kernel start → API answers, emulated
	budgetPatch   = 100 * time.Millisecond
	budgetP99     = 100 * time.Millisecond
	budgetVersion = 30 * time.Millisecond
	budgetGate    = 40e6 // bytes of memory of apid under the load below

	parallelClients = 200
	askedByEach     = 20
	versionRuns     = 21
	patchRuns       = 5

	// calm is how long apid may take to give back what the load took.
	calm = 90 * time.Second
	// idleGate is what counts as given back: near what it had before.
	idleGate = 1.25
)

// benchAPI measures the machine API of a node that serves.
func benchAPI(ctx context.Context, out io.Writer, root string, c *qemu.Cluster) ([]figure, error) {
	init, err := nodeInit(c, "")
	if err != nil {
		return nil, err
	}
	gate, err := nodeInit(c, "apid")
	if err != nil {
		return nil, err
	}
	who, err := access(c)
	if err != nil {
		return nil, err
	}
	version, err := benchVersion(ctx, root, c)
	if err != nil {
		return nil, err
	}
	load, err := benchLoad(ctx, out, who, c.Nodes[0].Address.String(), gate)
	if err != nil {
		return nil, err
	}
	// The last: it leaves an API server that starts anew.
	patch, err := benchPatch(ctx, who, c.Nodes[0].Address.String(), init)
	return append([]figure{version, patch}, load...), err
}

// benchVersion is how long a person waits for the shortest answer.
func benchVersion(ctx context.Context, root string, c *qemu.Cluster) (figure, error) {
	program := filepath.Join(root, "out", "gbctl")
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", program, "./tools/gbctl")
	build.Dir = root
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if said, err := build.CombinedOutput(); err != nil {
		return figure{}, fmt.Errorf("build gbctl: %w: %s", err, said)
	}
	var times []time.Duration
	for range versionRuns {
		cmd := exec.CommandContext(ctx, program, "version")
		cmd.Env = append(os.Environ(), client.EnvConfig+"="+c.ClientConfig())
		start := time.Now()
		if said, err := cmd.CombinedOutput(); err != nil {
			return figure{}, fmt.Errorf("gbctl version: %w: %s", err, said)
		}
		times = append(times, time.Since(start))
	}
	median := quantile(times, 0.5)
	return figure{what: "gbctl version, whole process, median", value: milliseconds(median), budget: "≤ " + milliseconds(budgetVersion), over: median > budgetVersion}, nil
}

// benchPatch is the time from asking for another argument of the API server until
// its static pod is on disk, as the node's own files show it.
func benchPatch(ctx context.Context, who *client.Context, node string, init int) (figure, error) {
	c, err := client.Dial(who, node)
	if err != nil {
		return figure{}, err
	}
	defer c.Close()
	got, err := client.Unary(ctx, c.Config.Get, &garboardv1.GetConfigRequest{})
	if err != nil {
		return figure{}, err
	}
	before := got.GetDocument()
	pod := fmt.Sprintf("/proc/%d/root/etc/kubernetes/manifests/garboard-kube-apiserver.yaml", init)
	var times []time.Duration
	apply := func(document []byte) error {
		_, err := c.Config.Apply(ctx, connect.NewRequest(&garboardv1.ApplyConfigRequest{Document: document, Mode: garboardv1.ApplyMode_APPLY_MODE_IMMEDIATE}))
		return err
	}
	for i := range patchRuns {
		mark := strconv.Itoa(100 + i) // of a module that isn't there: nothing changes but the text
		document := bytes.Replace(before, []byte("\n  apiServer:\n"), []byte("\n  apiServer:\n    extraArgs: {vmodule: bench="+mark+"}\n"), 1)
		if bytes.Equal(document, before) {
			return figure{}, errors.New("the node's configuration has no cluster.apiServer to change")
		}
		start := time.Now()
		if err := apply(document); err != nil {
			return figure{}, err
		}
		for {
			data, err := os.ReadFile(pod)
			if err == nil && bytes.Contains(data, []byte("bench="+mark)) {
				break
			}
			if time.Since(start) > 10*budgetPatch {
				return figure{}, fmt.Errorf("the changed static pod isn't on disk after %s: %w", time.Since(start), err)
			}
		}
		times = append(times, time.Since(start))
	}
	median := quantile(times, 0.5)
	return figure{what: "configuration patch → static pod on disk, median", value: milliseconds(median), budget: "≤ " + milliseconds(budgetPatch), over: median > budgetPatch},
		apply(before)
}

// benchLoad lets many clients, each with a connection of its own, read resources
// at the same time, beside one that follows a log and doesn't read.
func benchLoad(ctx context.Context, out io.Writer, who *client.Context, node string, gate int) ([]figure, error) {
	before, err := pss(gate)
	if err != nil {
		return nil, err
	}
	times, during, err := load(ctx, who, node, gate)
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(out, "waiting up to %s for apid to calm down\n", calm)
	during = max(during, before)
	after := during
	for start := time.Now(); time.Since(start) < calm && float64(after) > idleGate*float64(before); {
		if err := pause(ctx, time.Second); err != nil {
			return nil, err
		}
		if after, err = pss(gate); err != nil {
			return nil, err
		}
	}
	p99 := quantile(times, 0.99)
	return []figure{
		{what: fmt.Sprintf("%d clients reading resources, p50", parallelClients), value: milliseconds(quantile(times, 0.5))},
		{what: fmt.Sprintf("%d clients reading resources, p99", parallelClients), value: milliseconds(p99), budget: "≤ " + milliseconds(budgetP99), over: p99 > budgetP99},
		{what: "apid before the load, proportional set size", value: megabytes(before)},
		bytesFigure("apid under the load, proportional set size", during, budgetGate),
		{what: "apid after the load, proportional set size", value: megabytes(after), budget: fmt.Sprintf("≤ %.2f × before", idleGate), over: float64(after) > idleGate*float64(before)},
	}, nil
}

// load is how long each question took, and the most memory that apid had meanwhile.
// All clients are gone when it returns.
func load(ctx context.Context, who *client.Context, node string, gate int) (times []time.Duration, most int64, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lazy, err := client.Dial(who, node)
	if err != nil {
		return nil, 0, err
	}
	defer lazy.Close()
	stream, err := lazy.Log.Read(ctx, connect.NewRequest(&garboardv1.ReadLogRequest{Id: "kubelet", Follow: true}))
	if err != nil {
		return nil, 0, err
	}
	defer func() {
		cancel() // closing waits for the end otherwise
		stream.Close()
	}()
	clients := make([]*client.Client, parallelClients)
	for i := range clients {
		if clients[i], err = client.Dial(who, node); err != nil {
			return nil, 0, err
		}
		defer clients[i].Close()
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		times, err = askAll(ctx, clients)
	}()
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if now, err := pss(gate); err == nil {
				most = max(most, now)
			}
		case <-done:
			return times, most, err
		}
	}
}

// pace is how often a client asks: as a dashboard does. All at once would measure this machine's processors only.
const pace = 250 * time.Millisecond

// askAll has all clients ask, each at its pace, once all are connected.
func askAll(ctx context.Context, clients []*client.Client) (times []time.Duration, err error) {
	var connected, all sync.WaitGroup
	var mu sync.Mutex // guards times and err
	begin := make(chan struct{})
	ask := func(c *client.Client) error {
		_, err := c.Resource.List(ctx, connect.NewRequest(&garboardv1.ListResourcesRequest{Type: "staticpods"}))
		return err
	}
	connected.Add(len(clients))
	for i, c := range clients {
		all.Go(func() {
			failed := ask(c) // connects
			connected.Done()
			<-begin
			_ = pause(ctx, pace*time.Duration(i)/time.Duration(len(clients))) // or all would go on asking at the same moments
			var own []time.Duration
			for range askedByEach {
				start := time.Now()
				failed = errors.Join(failed, ask(c))
				own = append(own, time.Since(start))
				_ = pause(ctx, pace)
			}
			mu.Lock()
			defer mu.Unlock()
			times, err = append(times, own...), errors.Join(err, failed)
		})
	}
	connected.Wait()
	close(begin)
	all.Wait()
	return times, err
}

// pss is a process' proportional set size in bytes (proc(5), smaps_rollup).
func pss(pid int) (int64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		if kib, ok := strings.CutPrefix(line, "Pss:"); ok {
			n, err := strconv.ParseInt(strings.Fields(kib)[0], 10, 64)
			return n << 10, err
		}
	}
	return 0, fmt.Errorf("/proc/%d/smaps_rollup has no Pss", pid)
}

func quantile(times []time.Duration, q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(times))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000)
}
