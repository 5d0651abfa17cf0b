package devcluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
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

	// patience is how often Create says what it waits for.
	patience = 5 * time.Second
	// tailBytes of a console hold the last lines that the node said.
	tailBytes = 16 << 10
)

// ReadyBudgets are these, in words.
const ReadyBudgets = "3m and 1m for each further node; 20m where QEMU emulates"

// AwaitReady tells what is reached and, in between, what it waits for. reached,
// if any, hears of each milestone too. budget 0 is one for clusters of this kind.
func AwaitReady(ctx context.Context, out io.Writer, c *qemu.Cluster, start time.Time, budget time.Duration, reached func(qemu.Milestone)) error {
	if budget == 0 {
		budget = readyBudget + time.Duration(len(c.Nodes)-1)*readyBudgetNode
		if c.Accelerator == "tcg" {
			budget = readyBudgetEmulated
		}
	}
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	said := time.Now()
	err := c.WaitReady(ctx,
		func(m qemu.Milestone) {
			fmt.Fprintf(out, "%6.1fs  %s\n", time.Since(start).Seconds(), m.What)
			if reached != nil {
				reached(m)
			}
		},
		func(why error) {
			if time.Since(said) < patience {
				return
			}
			said = time.Now()
			fmt.Fprintf(out, "%6.1fs  … %s\n", time.Since(start).Seconds(), oneLine(waitingFor(c, why)))
		})
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("cluster %s doesn't serve within %s: %w\n%s", c.Name, budget, err, stays(c))
	}
	return err
}

// stays says what can be done with a cluster that doesn't serve.
func stays(c *qemu.Cluster) string {
	return fmt.Sprintf(`The cluster stays as it is, to be looked into:
  'GARBOARDCONFIG=%[2]s gbctl doctor' says what it waits for,
  'gbctl cluster show --name %[1]s' how its nodes are, and
  the nodes' consoles tell more: %[3]s
'gbctl cluster destroy --name %[1]s' removes it.`, c.Name, c.ClientConfig(), c.Console("*"))
}

// waitingFor prefers the node's own words to a refused connection.
func waitingFor(c *qemu.Cluster, why error) string {
	if !errors.Is(why, syscall.ECONNREFUSED) && !errors.Is(why, io.EOF) && !errors.Is(why, syscall.ECONNRESET) {
		return why.Error()
	}
	if line := lastSaid(c.Console(c.Nodes[0].Name)); line != "" {
		return line
	}
	return "the node boots"
}

// said is a line of Garboard on a console, after the kernel's timestamp.
var said = regexp.MustCompile(`\[garboard\] (.*)`)

// lastSaid is the last thing the node said on its console, "" for nothing yet.
func lastSaid(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	if end, err := f.Seek(0, io.SeekEnd); err == nil {
		_, _ = f.Seek(max(end-tailBytes, 0), io.SeekStart)
	}
	data, err := io.ReadAll(f)
	if err != nil {
		return ""
	}
	all := said.FindAllSubmatch(data, -1)
	if len(all) == 0 {
		return ""
	}
	return string(bytes.TrimSpace(all[len(all)-1][1]))
}

func oneLine(s string) string {
	const width = 160 // a wide terminal
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > width {
		s = s[:width-1] + "…"
	}
	return s
}
