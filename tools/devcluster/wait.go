package devcluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/garboard-os/garboard/qemu"
)

const (
	// How long a cluster may take to serve, from power-on. Emulated nodes run ten
	// times slower; both leave room for a busy machine. Nodes share its processors, so
	// each further one adds to it.
	readyBudget         = 3 * time.Minute
	readyBudgetEmulated = 20 * time.Minute
	readyBudgetNode     = time.Minute

	// progressInterval is how often Create prints what it waits for.
	progressInterval = 5 * time.Second
	// tailBytes is how much of a console log is searched for the last line of the node.
	tailBytes = 16 << 10
)

// ReadyBudgets describes these budgets.
const ReadyBudgets = "3m and 1m for each further node; 20m where QEMU emulates"

// awaitReady waits until a cluster is ready. It prints each milestone and, in between,
// what it waits for. budget 0 is the default for this kind of cluster.
func awaitReady(ctx context.Context, out io.Writer, c *qemu.Cluster, start time.Time, budget time.Duration) error {
	if budget == 0 {
		budget = readyBudget + time.Duration(len(c.Nodes)-1)*readyBudgetNode
		if c.Accelerator == "tcg" {
			budget = readyBudgetEmulated
		}
	}
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	last := time.Now()
	err := c.WaitReady(ctx,
		func(m qemu.Milestone) { fmt.Fprintf(out, "%6.1fs  %s\n", time.Since(start).Seconds(), m.What) },
		func(why error) {
			if time.Since(last) < progressInterval {
				return
			}
			last = time.Now()
			fmt.Fprintf(out, "%6.1fs  … %s\n", time.Since(start).Seconds(), oneLine(waitingFor(c, why)))
		})
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("cluster %s isn't ready after %s: %w\n%s%s", c.Name, budget, err, failing(c), keptMessage(c))
	}
	return err
}

// failing are the last failures of controllers, a line for each node that has one.
func failing(c *qemu.Cluster) (lines string) {
	for _, n := range c.Nodes {
		if line := lastMessage(c.Console(n.Name), failed.MatchString); line != "" {
			lines += fmt.Sprintf("Node %s: %s\n", n.Name, line)
		}
	}
	return lines
}

// keptMessage describes how to inspect a cluster that isn't ready.
func keptMessage(c *qemu.Cluster) string {
	return fmt.Sprintf(`The cluster is kept for inspection:
  'GARBOARDCONFIG=%[2]q gbctl doctor' shows what it waits for,
  'gbctl cluster show --name %[1]s' the state of the machines, and
  the console logs have more details: %[3]s
'gbctl cluster destroy --name %[1]s' removes it.`, c.Name, c.ClientConfig(), c.Console("*"))
}

// waitingFor returns the last console message of the node instead of a refused
// connection.
func waitingFor(c *qemu.Cluster, why error) string {
	if !errors.Is(why, syscall.ECONNREFUSED) && !errors.Is(why, io.EOF) && !errors.Is(why, syscall.ECONNRESET) {
		return why.Error()
	}
	if line := lastMessage(c.Console(c.Nodes[0].Name), awaited); line != "" {
		return line
	}
	return "the node boots"
}

// message is a line of Garboard on a console, after the kernel's timestamp.
var message = regexp.MustCompile(`\[garboard\] (.*)`)

var (
	// aside are messages that aren't what the node waits for: what a controller failed to do, it tries again, and
	// during a start most of that comes too early. The chart of the boot comes when all services are up.
	aside = regexp.MustCompile(`^(controller-runtime: |boot chart|[ *.] )`)
	// failed are those of a controller that failed.
	failed = regexp.MustCompile(`^controller-runtime: .* controller failed: `)
)

// awaited is true of a message of what the node waits for.
func awaited(text string) bool { return !aside.MatchString(text) }

// lastMessage returns the last message of the node on its console that is of a kind, or "".
func lastMessage(path string, of func(text string) bool) string {
	for _, found := range slices.Backward(message.FindAllStringSubmatch(qemu.ReadLast(path, tailBytes), -1)) {
		if of(found[1]) {
			return strings.TrimSpace(found[1])
		}
	}
	return ""
}

func oneLine(s string) string {
	const width = 160 // a wide terminal
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > width {
		s = s[:width-1] + "…"
	}
	return s
}
