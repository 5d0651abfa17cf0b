package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/tools/devcluster"
)

const (
	// How long the API may be away from clients of the load balancer: in total while a control
	// plane becomes static pods, and at once while it is upgraded.
	budgetConvert = 5 * time.Second
	budgetUpgrade = 2 * time.Second
	// budgetProgram is for one program of the control plane on one node, in the median: until
	// it is healthy in its new version.
	budgetProgram = 6 * time.Second

	// operationWait bounds one operation on four nodes.
	operationWait = 45 * time.Minute
)

// programs are the steps of upgrade-k8s whose parts are measured.
var programs = []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler"}

// benchOperations converts a self-hosted control plane, and upgrades it, and asks all the time
// whether an API server is ready.
func benchOperations(ctx context.Context, out io.Writer, root string) (_ []figure, err error) {
	const name = "bench-operations"
	if err := qemu.Down(ctx, name); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, qemu.Down(context.WithoutCancel(ctx), name)) }()
	made, err := devcluster.Create(ctx, out, devcluster.Options{Checkout: root, Cluster: qemu.Options{
		Name: name, Provisioner: qemu.Container, ControlPlanes: benchControlPlanes, Workers: benchWorkers,
		SelfHosted: true, KubernetesVersion: components.OtherKubernetesVersion,
	}})
	if err != nil {
		return nil, err
	}
	c := made.Cluster
	what := fmt.Sprintf("%d control planes + %d worker: ", benchControlPlanes, benchWorkers)
	convert, err := operate(ctx, out, c, func(ctx context.Context, node *client.Client) (*garboardv1.Operation, error) {
		r, err := client.Unary(ctx, node.Node.ConvertKubernetes, &garboardv1.ConvertKubernetesRequest{Yes: true, RemoveCheckpoints: true})
		return r.GetOperation(), err
	})
	if err != nil {
		return nil, err
	}
	upgrade, err := operate(ctx, out, c, func(ctx context.Context, node *client.Client) (*garboardv1.Operation, error) {
		r, err := client.Unary(ctx, node.Node.UpgradeKubernetes, &garboardv1.UpgradeKubernetesRequest{To: config.KubernetesVersion, Yes: true})
		return r.GetOperation(), err
	})
	if err != nil {
		return nil, err
	}
	program := quantile(upgrade.programs(), 0.5)
	return []figure{
		{what: what + "convert-k8s", value: seconds(convert.took)},
		{what: what + "convert-k8s: no API server for, in total", value: seconds(convert.away), budget: "≤ " + seconds(budgetConvert), over: convert.away > budgetConvert},
		{what: what + "upgrade-k8s", value: seconds(upgrade.took)},
		{what: what + "upgrade-k8s: no API server for, at most", value: seconds(upgrade.longest), budget: "≤ " + seconds(budgetUpgrade), over: upgrade.longest > budgetUpgrade},
		{what: what + "upgrade-k8s: one program on one node after the first, median", value: seconds(program), budget: "≤ " + seconds(budgetProgram), over: program > budgetProgram},
	}, nil
}

// An operated is an operation that is done, and what clients noticed of it.
type operated struct {
	*garboardv1.Operation
	took, away, longest time.Duration
}

// programs is the time for each program on each node but the first one, where it is watched for a while after it is healthy.
func (o operated) programs() []time.Duration {
	var all []time.Duration
	for _, step := range o.GetSteps() {
		if !slices.Contains(programs, step.GetId()) {
			continue
		}
		for _, part := range step.GetParts()[min(1, len(step.GetParts())):] {
			all = append(all, part.GetEnded().AsTime().Sub(part.GetBegan().AsTime()))
		}
	}
	return all
}

// operate runs an operation on the first node to its end.
func operate(ctx context.Context, out io.Writer, c *qemu.Cluster, start func(context.Context, *client.Client) (*garboardv1.Operation, error)) (operated, error) {
	ctx, cancel := context.WithTimeout(ctx, operationWait)
	defer cancel()
	node, err := dial(c, c.Nodes[0])
	if err != nil {
		return operated{}, err
	}
	defer node.Close()
	if err := awaitAPI(ctx, c); err != nil { // it may still be away after the operation before
		return operated{}, err
	}
	stop := make(chan struct{})
	silences := make(chan []time.Duration)
	go func() { silences <- unready(ctx, c, stop) }()
	began := time.Now()
	done, err := follow(ctx, out, node, start)
	took := time.Since(began)
	if err == nil {
		err = awaitAPI(ctx, c)
	}
	close(stop)
	all := <-silences
	if err != nil {
		return operated{}, err
	}
	o := operated{Operation: done, took: took}
	for _, s := range all {
		o.away += s
		o.longest = max(o.longest, s)
	}
	return o, nil
}

// awaitAPI waits until an API server is ready at the endpoint.
func awaitAPI(ctx context.Context, c *qemu.Cluster) error {
	for {
		err := askReady(ctx, c)
		if err == nil {
			return nil
		}
		if pause(ctx, askEvery) != nil {
			return fmt.Errorf("no API server is ready: %w", err)
		}
	}
}

// follow starts an operation, and prints its events until it is done.
func follow(ctx context.Context, out io.Writer, node *client.Client, start func(context.Context, *client.Client) (*garboardv1.Operation, error)) (*garboardv1.Operation, error) {
	o, err := start(ctx, node)
	if err != nil {
		return nil, err
	}
	request := &garboardv1.WatchOperationRequest{Id: o.GetId()}
	var lost error
	for ctx.Err() == nil {
		// The node's API is away for a moment while its certificates change.
		stream, err := node.Operation.Watch(ctx, connect.NewRequest(request))
		for err == nil && stream.Receive() {
			for _, event := range stream.Msg().GetEvents() {
				request.After = event.GetCursor()
				fmt.Fprintln(out, o.GetName(), event.GetStep(), event.GetPart(), event.GetState(), event.GetText())
			}
			o = stream.Msg().GetOperation()
			switch o.GetState() {
			case garboardv1.Operation_STATE_DONE:
				return o, nil
			case garboardv1.Operation_STATE_FAILED, garboardv1.Operation_STATE_ABORTED:
				return nil, fmt.Errorf("%s: %s", o.GetId(), o.GetError())
			}
		}
		if err == nil {
			err = stream.Err()
		}
		lost = err
		_ = pause(ctx, askEvery)
	}
	return nil, errors.Join(ctx.Err(), lost)
}

// unready are the times without a ready API server at the endpoint, until stop is closed.
func unready(ctx context.Context, c *qemu.Cluster, stop <-chan struct{}) []time.Duration {
	var all []time.Duration
	var since time.Time
	for {
		select {
		case <-stop:
			if !since.IsZero() {
				all = append(all, time.Since(since))
			}
			return all
		case <-ctx.Done():
			return all
		case <-time.After(askEvery):
		}
		asked := time.Now()
		switch err := askReady(ctx, c); {
		case err != nil && since.IsZero():
			since = asked
		case err == nil && !since.IsZero():
			all = append(all, time.Since(since))
			since = time.Time{}
		}
	}
}
