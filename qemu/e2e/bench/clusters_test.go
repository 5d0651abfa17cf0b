//go:build e2e

package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

const (
	// What is promised of a cluster of three control planes and a worker, as containers on
	// two processors.
	budgetCreate  = 15 * time.Second
	budgetDestroy = 10 * time.Second
	// budgetMove is for the shared address to be on another node after its holder was killed, in the median.
	budgetMove = 2 * time.Second
	// budgetWorst is for the worst of them.
	budgetWorst = 3 * time.Second
	// How long the API may be away from clients of the load balancer: in total while a control
	// plane becomes static pods, and at once while it is upgraded.
	budgetConvert = 5 * time.Second
	budgetUpgrade = 2 * time.Second
	// budgetProgram is for one program of the control plane on one node, in the median: until
	// it is healthy in its new version.
	budgetProgram = 5 * time.Second

	controlPlanes, workers = 3, 1
	moveRuns               = 10
	// askEvery is how often it is asked whether an API server answers, and askWait how
	// long for an answer is waited: it is how exact the figures are.
	askEvery = 50 * time.Millisecond
	askWait  = 500 * time.Millisecond

	// moveBudget is for one move, and for a killed node to be back. operationBudget is for one operation on four nodes.
	moveBudget      = 5 * time.Minute
	operationBudget = 45 * time.Minute
)

// several makes and removes a cluster of several nodes, some times in a row. The nodes of the first are weighed.
func several(b *testing.B) {
	boots(b, qemu.Container)
	var created, removed []time.Duration
	var weights []figure
	for i := range *clusters {
		c, m := e2etest.Ready(b, "bench-several", qemu.Container, e2etest.Nodes(controlPlanes, workers))
		created = append(created, m.Took())
		if i == 0 {
			b.Logf("letting the nodes settle for %s", settle)
			<-time.After(settle)
			weights = []figure{weight(b, c, c.Nodes[0], "a control plane of three"), weight(b, c, c.Nodes[controlPlanes], "a worker")}
		}
		start := time.Now()
		c.Down()
		removed = append(removed, time.Since(start))
	}
	what := fmt.Sprintf("%d control planes + %d worker, containers: ", controlPlanes, workers)
	report(b, longest(what+"create → all Ready, DNS serves", created, budgetCreate), longest(what+"destroy", removed, budgetDestroy))
	report(b, weights...)
}

// asked asks all the time, over new connections, whether an API server is ready at the endpoint.
func asked(c *e2etest.Cluster) *e2etest.Writer {
	endpoint := c.Endpoint().Anew(askWait)
	w := c.Write(e2etest.Store{Name: "the endpoint", Every: askEvery, Write: func(ctx context.Context, _, _ string) error {
		_, err := endpoint.Get(ctx, "/readyz")
		return err
	}})
	w.Goes(moveBudget, "before") // it may still be away after the operation before
	return w
}

// silences are the total and the longest time without a ready API server, once there is one again.
func silences(w *e2etest.Writer) (total, longest time.Duration) {
	w.Goes(moveBudget, "afterwards")
	w.Stop()
	for _, o := range w.Outages() {
		total, longest = total+o.Took, max(longest, o.Took)
	}
	return total, longest
}

// shared kills the holder of a shared address, again and again.
func shared(b *testing.B) {
	boots(b, qemu.Container)
	c, _ := e2etest.Ready(b, "bench-shared", qemu.Container, e2etest.Nodes(controlPlanes, 0), func(o *qemu.Options) { o.SharedAddress = true })
	var moves, silent []time.Duration
	for run := range moveRuns {
		move, silence := killHolder(b, c)
		b.Logf("kill %d: another node has the address after %s; no API server for %s", run+1, seconds(move), seconds(silence))
		moves, silent = append(moves, move), append(silent, silence)
	}
	report(b,
		of(seconds, fmt.Sprintf("shared address: holder killed → on another node, median of %d", moveRuns), quantile(moves, 0.5), budgetMove),
		of(seconds, "shared address: the same, worst", quantile(moves, 1), budgetWorst),
		of(seconds, "shared address: time without an answering API server, median", quantile(silent, 0.5)),
		of(seconds, "shared address: the same, worst", quantile(silent, 1)))
}

// killHolder takes the holder's power away, and gives it back when another node serves at
// the address. All three could have it when it begins.
func killHolder(b *testing.B, c *e2etest.Cluster) (move, silence time.Duration) {
	var holder qemu.Node
	c.Eventually(moveBudget, "all control planes could have the address", func() error {
		all, err := c.Holders(c.Shared)
		if err == nil && len(all) != 1 {
			err = fmt.Errorf("%d nodes have it", len(all))
		}
		if err != nil {
			return err
		}
		holder = all[0]
		out, err := c.TryGbctl("-n", holder.Address.String(), "get", "vip", "-o", "yaml")
		if err == nil && !strings.Contains(out, fmt.Sprintf("candidates: %d\n", len(c.Nodes))) {
			err = errors.New(out)
		}
		return err
	})
	w := asked(c)
	began := time.Now()
	if err := c.Cut(b.Context(), holder.Name); err != nil {
		b.Fatal(err)
	}
	for tick := time.Tick(askEvery); ; <-tick {
		all, err := c.Holders(c.Shared)
		if move = time.Since(began); err == nil && len(all) > 0 {
			break
		}
		if move > moveBudget {
			b.Fatalf("no other node has the address: %v", err)
		}
	}
	_, silence = silences(w)
	if err := c.On(b.Context(), holder.Name); err != nil {
		b.Fatal(err)
	}
	return move, silence
}

// operations converts a self-hosted control plane, and upgrades it.
func operations(b *testing.B) {
	boots(b, qemu.Container)
	c, _ := e2etest.Ready(b, "bench-operations", qemu.Container, e2etest.Nodes(controlPlanes, workers),
		e2etest.OtherKubernetes(b), e2etest.SelfHosted(b, components.OtherKubernetesVersion))
	c.SelfHost()
	convert := operate(b, c, "convert-k8s", "--yes", "--remove-checkpoints")
	upgrade := operate(b, c, "upgrade-k8s", "--yes", "--to", strings.TrimPrefix(config.KubernetesVersion, "v"))
	what := fmt.Sprintf("%d control planes + %d worker: ", controlPlanes, workers)
	report(b,
		of(seconds, what+"convert-k8s", convert.took),
		of(seconds, what+"convert-k8s: no API server for, in total", convert.away, budgetConvert),
		of(seconds, what+"upgrade-k8s", upgrade.took),
		of(seconds, what+"upgrade-k8s: no API server for, at most", upgrade.longest, budgetUpgrade),
		of(seconds, what+"upgrade-k8s: one program on one node after the first, median", quantile(upgrade.programs(), 0.5), budgetProgram))
}

// An operated is an operation that is done, and what clients noticed of it.
type operated struct {
	*garboardv1.Operation
	took, away, longest time.Duration
}

// programs is the time for each program on each node but the first one, where it is watched for a while after it is
// healthy.
func (o operated) programs() (all []time.Duration) {
	for _, step := range o.GetSteps() {
		if slices.Contains([]string{"kube-apiserver", "kube-controller-manager", "kube-scheduler"}, step.GetId()) {
			for _, part := range step.GetParts()[min(1, len(step.GetParts())):] {
				all = append(all, part.GetEnded().AsTime().Sub(part.GetBegan().AsTime()))
			}
		}
	}
	return all
}

// operate runs an operation on the first node to its end.
func operate(b *testing.B, c *e2etest.Cluster, command ...string) (o operated) {
	b.Helper()
	w := asked(c)
	node := c.Nodes[0].Address.String()
	b.Log(c.Patient(operationBudget).Gbctl(append([]string{"-n", node}, command...)...))
	o.away, o.longest = silences(w)
	machine, err := client.Dial(c.Access(), node)
	if err != nil {
		b.Fatal(err)
	}
	defer machine.Close()
	c.Eventually(moveBudget, "the operation has ended", func() error {
		all, err := client.Unary(b.Context(), machine.Operation.List, &garboardv1.ListOperationsRequest{})
		if err != nil {
			return err
		}
		for _, one := range all.GetOperations() {
			if one.GetName() == command[0] && one.GetEnded() != nil {
				o.Operation = one
				return nil
			}
		}
		return fmt.Errorf("operations are %v", all.GetOperations())
	})
	o.took = o.GetEnded().AsTime().Sub(o.GetBegan().AsTime())
	return o
}
