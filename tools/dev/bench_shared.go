package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/tools/devcluster"
)

const (
	// budgetMove is for the shared address to be on another node after its holder was
	// killed, in the median.
	budgetMove = 5 * time.Second

	moveRuns = 10
	// moveWait is how long one move may take, and a killed node to be back.
	moveWait = 5 * time.Minute
	// askEvery is how often it is asked whether an API server answers, and askWait how
	// long for an answer is waited: it is how exact the figures are.
	askEvery = 50 * time.Millisecond
	askWait  = 500 * time.Millisecond
)

// benchShared kills the holder of a shared address, again and again.
func benchShared(ctx context.Context, out io.Writer, made *image.Artifacts) (_ []figure, err error) {
	const name = "bench-shared"
	if err := qemu.Down(ctx, name); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, qemu.Down(context.WithoutCancel(ctx), name)) }()
	start := time.Now()
	c, err := devcluster.Start(ctx, out, qemu.Options{Name: name, Provisioner: qemu.Container, ControlPlanes: 3, SharedAddress: true}, made)
	if err != nil {
		return nil, err
	}
	if err := devcluster.AwaitReady(ctx, out, c, start, 0, nil); err != nil {
		return nil, err
	}
	var moves, silences []time.Duration
	for run := range moveRuns {
		move, silence, err := killHolder(ctx, c)
		if err != nil {
			return nil, fmt.Errorf("kill the holder of the shared address: %w", err)
		}
		fmt.Fprintf(out, "kill %d: another node has the address after %s; no API server for %s\n", run+1, seconds(move), seconds(silence))
		moves, silences = append(moves, move), append(silences, silence)
	}
	median := quantile(moves, 0.5)
	return []figure{
		{what: fmt.Sprintf("shared address: holder killed → on another node, median of %d", moveRuns), value: seconds(median), budget: "≤ " + seconds(budgetMove), over: median > budgetMove},
		{what: "shared address: the same, worst", value: seconds(quantile(moves, 1))},
		{what: "shared address: time without an answering API server, median", value: seconds(quantile(silences, 0.5))},
		{what: "shared address: the same, worst", value: seconds(quantile(silences, 1))},
	}, nil
}

// killHolder takes the holder's power away, and gives it back when another node
// serves at the address. All three could have it when it begins.
func killHolder(ctx context.Context, c *qemu.Cluster) (move, silence time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, moveWait)
	defer cancel()
	var holder qemu.Node
	if err := poll(ctx, func() error {
		all, err := c.Holders(c.Shared)
		if err == nil && len(all) != 1 {
			err = fmt.Errorf("%d nodes have the address", len(all))
		}
		if err != nil {
			return err
		}
		holder = all[0]
		return allCandidates(ctx, c, holder)
	}); err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if err := c.Cut(ctx, holder.Name); err != nil {
		return 0, 0, err
	}
	answered := make(chan error, 1)
	go func() {
		err := poll(ctx, func() error { return askReady(ctx, c) })
		silence = time.Since(began)
		answered <- err
	}()
	moved := poll(ctx, func() error {
		all, err := c.Holders(c.Shared)
		if err == nil && len(all) == 0 {
			err = errors.New("no node has the address")
		}
		return err
	})
	move = time.Since(began)
	if err := errors.Join(moved, <-answered); err != nil {
		return 0, 0, err
	}
	return move, silence, c.On(ctx, holder.Name)
}

// pause waits. It ends early, with an error, if ctx does.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// poll waits until check returns nil.
func poll(ctx context.Context, check func() error) error {
	for {
		err := check()
		if err == nil {
			return nil
		}
		if ended := pause(ctx, askEvery); ended != nil {
			return errors.Join(ended, err)
		}
	}
}

// allCandidates is nil once every control plane could have the address.
func allCandidates(ctx context.Context, c *qemu.Cluster, holder qemu.Node) error {
	node, err := dial(c, holder)
	if err != nil {
		return err
	}
	defer node.Close()
	got, err := client.Unary(ctx, node.Resource.List, &garboardv1.ListResourcesRequest{Type: "vip"})
	if err != nil {
		return err
	}
	want := fmt.Sprintf("candidates: %d\n", len(c.Nodes))
	for _, item := range got.GetItems() {
		if strings.Contains(item.GetSpec(), want) {
			return nil
		}
	}
	return errors.New("not all control planes could have the address yet")
}

// askReady asks, over a new connection, whether an API server is ready at the
// endpoint. That anybody may ask.
func askReady(ctx context.Context, c *qemu.Cluster) error {
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext:       (&net.Dialer{Timeout: askWait}).DialContext,
		// Only the answer counts here, of a port of this machine.
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
	}
	ctx, cancel := context.WithTimeout(ctx, askWait)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("https://127.0.0.1:%d/readyz", c.KubernetesPort), nil)
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}
