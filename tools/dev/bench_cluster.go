package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"time"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/tools/devcluster"
	"golang.org/x/sys/unix"
)

// What is promised of a cluster of three control planes and a worker, as containers on
// two processors.
const (
	budgetCreate  = 60 * time.Second
	budgetDestroy = 10 * time.Second

	benchControlPlanes, benchWorkers = 3, 1
)

// benchCluster makes and removes a cluster of several nodes, some times in a row.
func benchCluster(ctx context.Context, out io.Writer, made *image.Artifacts, times int) ([]figure, error) {
	return repeat(times, func(weigh bool) (create, destroy time.Duration, weights []figure, err error) {
		return benchOnce(ctx, out, made, weigh)
	})
}

// repeat makes the rows of what is done some times; the nodes of the first are weighed.
func repeat(times int, once func(weigh bool) (create, destroy time.Duration, weights []figure, err error)) ([]figure, error) {
	var creations, removals []time.Duration
	var weights []figure
	for i := range times {
		create, destroy, nodes, err := once(i == 0)
		if err != nil {
			return nil, fmt.Errorf("cluster %d of %d: %w", i+1, times, err)
		}
		creations, removals = append(creations, create), append(removals, destroy)
		weights = append(weights, nodes...)
	}
	what := fmt.Sprintf("%d control planes + %d worker, containers: ", benchControlPlanes, benchWorkers)
	return append([]figure{
		longest(what+"create → all Ready, DNS serves", creations, budgetCreate),
		longest(what+"destroy", removals, budgetDestroy),
	}, weights...), nil
}

// longest is the row of something that was done some times.
func longest(what string, took []time.Duration, budget time.Duration) figure {
	worst := slices.Max(took)
	value := seconds(worst)
	if len(took) > 1 {
		what += fmt.Sprintf(", longest of %d (median)", len(took))
		value += fmt.Sprintf(" (%s)", seconds(quantile(took, 0.5)))
	}
	return figure{what: what, value: value, budget: "≤ " + seconds(budget), over: worst > budget}
}

func benchOnce(ctx context.Context, out io.Writer, made *image.Artifacts, weigh bool) (create, destroy time.Duration, weights []figure, err error) {
	const name = "bench-several"
	if err := qemu.Down(ctx, name); err != nil {
		return 0, 0, nil, err
	}
	defer func() { err = errors.Join(err, qemu.Down(context.WithoutCancel(ctx), name)) }()
	start := time.Now()
	c, err := devcluster.Start(ctx, out, qemu.Options{Name: name, Provisioner: qemu.Container, ControlPlanes: benchControlPlanes, Workers: benchWorkers}, made)
	if err != nil {
		return 0, 0, nil, err
	}
	if err := devcluster.AwaitReady(ctx, out, c, start, 0, nil); err != nil {
		return 0, 0, nil, err
	}
	create = time.Since(start)
	if weigh {
		if weights, err = nodeWeights(ctx, out, c); err != nil {
			return 0, 0, nil, err
		}
	}
	start = time.Now()
	err = qemu.Down(ctx, name)
	return create, time.Since(start), weights, err
}

// nodeWeights are what a control plane of three and a worker take.
func nodeWeights(ctx context.Context, out io.Writer, c *qemu.Cluster) ([]figure, error) {
	fmt.Fprintf(out, "letting the nodes settle for %s\n", settle)
	if err := pause(ctx, settle); err != nil {
		return nil, err
	}
	var all []figure
	for _, of := range []struct {
		node qemu.Node
		what string
	}{{c.Nodes[0], "a control plane of three"}, {c.Nodes[len(c.Nodes)-1], "a worker"}} {
		f, err := weigh(c, of.node, of.what)
		if err != nil {
			return nil, err
		}
		all = append(all, f)
	}
	return all, nil
}

// weigh is what all processes of a node take: those of Garboard, of Kubernetes and of the
// pods that it begins with.
func weigh(c *qemu.Cluster, node qemu.Node, what string) (figure, error) {
	pids, err := c.NodeProcesses(node.Name)
	if err != nil {
		return figure{}, err
	}
	var total int64
	for _, pid := range pids {
		n, err := pss(pid)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // it has ended meanwhile
		}
		if err != nil {
			return figure{}, err
		}
		total += n
	}
	return figure{what: fmt.Sprintf("memory of %s, all %d processes, proportional set size", what, len(pids)), value: megabytes(total)}, nil
}
