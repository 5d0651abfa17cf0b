package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/tools/devcluster"
	"github.com/spf13/cobra"
)

// Budgets are those of docs/design.md.
const (
	budgetInit    = 33e6 // bytes of PID 1, stripped
	budgetPSS     = 60e6 // bytes of memory of PID 1 and its helpers, idle
	budgetPayload = 64e6 // bytes over the network to boot
	budgetReady   = 15 * time.Second
	budgetIdle    = 25 // percent of one processor that an idle control plane uses, at native speed

	// controlPlaneMiB is the memory in which a one-node control plane has to run,
	// so the bench gives a virtual machine no more.
	controlPlaneMiB = 2048

	// settle is how long a node that just came up is left alone before its memory
	// is read: "idle" is a minute after boot.
	settle = 20 * time.Second
	// idleTime is how long the processor time of an idle node is counted: as long as the
	// longest period of its services.
	idleTime = time.Minute
)

// A figure is one row of the bench.
type figure struct {
	what   string
	value  string
	budget string // "" where the design names none
	over   bool
}

func benchCommand() *cobra.Command {
	var provisioner string
	var clusters int
	var only string
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure, and print each figure beside its budget",
		Long: `Measure, and print each figure beside its budget. It fails if one is over.

Boots a fresh one-node cluster as a container and one in QEMU, one after the
other, then one of several containers, and one whose control planes share an address,
and removes them again. Times on a machine that does other things wobble:
compare figures of one run.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return bench(cmd.Context(), cmd.OutOrStdout(), provisioner, only, clusters)
		},
	}
	cmd.Flags().StringVar(&only, "only", "", "make only these figures, such as install or operations (default all)")
	cmd.Flags().StringVar(&provisioner, "provisioner", qemu.Auto, "what to boot: qemu, container, or auto for both")
	cmd.Flags().IntVar(&clusters, "clusters", 1, "how many clusters of several containers are made, one after the other; 1 or more")
	return cmd
}

func bench(ctx context.Context, out io.Writer, provisioner, only string, clusters int) error {
	switch {
	case provisioner != qemu.Auto && provisioner != qemu.Container && provisioner != qemu.QEMU:
		return fmt.Errorf("--provisioner %q: must be %s, %s or %s", provisioner, qemu.QEMU, qemu.Container, qemu.Auto)
	case clusters < 1:
		return fmt.Errorf("--clusters %d: must be 1 or more", clusters)
	}
	root, err := prepared(ctx, out, false)
	if err != nil {
		return err
	}
	made, err := devcluster.Build(ctx, root, out, image.Build, image.Cloud)
	if err != nil {
		return err
	}
	node := func(provisioner string) measure {
		return measure{provisioner, func() ([]figure, error) { return benchNode(ctx, out, root, provisioner, made) }}
	}
	all := []measure{
		{"sizes", func() ([]figure, error) { return sizes(made) }},
		{"media", func() ([]figure, error) { return benchMedia(ctx, out, root) }},
	}
	switch {
	case provisioner == qemu.QEMU:
	case os.Geteuid() != 0:
		fmt.Fprintln(out, "container nodes need root: left out")
	default:
		all = append(all, node(qemu.Container),
			measure{"several containers", func() ([]figure, error) { return benchCluster(ctx, out, made, clusters) }},
			measure{"shared address", func() ([]figure, error) { return benchShared(ctx, out, made) }},
			measure{"operations", func() ([]figure, error) { return benchOperations(ctx, out, root) }})
	}
	if provisioner != qemu.Container {
		all = append(all, node(qemu.QEMU), measure{"install", func() ([]figure, error) { return benchInstall(ctx, out, root) }})
	}
	if only != "" {
		var names []string
		for _, m := range all {
			names = append(names, m.name)
		}
		all = slices.DeleteFunc(all, func(m measure) bool { return m.name != only })
		if len(all) == 0 {
			return fmt.Errorf("--only %q: must be one of %s", only, strings.Join(names, ", "))
		}
	}
	return measureAll(out, all)
}

// A measure makes some of the figures.
type measure struct {
	name string
	run  func() ([]figure, error)
}

// measureAll prints what was measured, also where something later fails: each figure takes
// minutes.
func measureAll(out io.Writer, all []measure) error {
	var figures []figure
	for _, m := range all {
		measured, err := m.run()
		figures = append(figures, measured...)
		if err != nil {
			fmt.Fprintln(out)
			return errors.Join(fmt.Errorf("%s: %w", m.name, err), printFigures(out, figures))
		}
	}
	fmt.Fprintln(out)
	return printFigures(out, figures)
}

// printFigures fails where one is over its budget, and says which.
func printFigures(out io.Writer, figures []figure) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "WHAT\tFIGURE\tBUDGET\t")
	var over []string
	for _, f := range figures {
		verdict := ""
		if f.over {
			verdict = "over budget"
			over = append(over, fmt.Sprintf("%s: %s, %s is allowed", f.what, f.value, f.budget))
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", f.what, f.value, f.budget, verdict)
	}
	if err := w.Flush(); err != nil || len(over) == 0 {
		return err
	}
	return fmt.Errorf("over budget:\n  %s", strings.Join(over, "\n  "))
}

func sizes(made *image.Artifacts) ([]figure, error) {
	size := func(paths ...string) (total int64, err error) {
		for _, p := range paths {
			info, err := os.Stat(p)
			if err != nil {
				return 0, err
			}
			total += info.Size()
		}
		return total, nil
	}
	pid1, err := size(made.Init)
	if err != nil {
		return nil, err
	}
	payload, err := size(made.Kernel, made.Initramfs)
	if err != nil {
		return nil, err
	}
	return []figure{
		bytesFigure("PID 1 binary, stripped", pid1, budgetInit),
		bytesFigure("kernel + initramfs with root filesystem", payload, budgetPayload),
	}, nil
}

// benchNode boots one fresh node, reads when it reached what, and removes it.
func benchNode(ctx context.Context, out io.Writer, root, provisioner string, made *image.Artifacts) (_ []figure, err error) {
	name := "bench-" + provisioner
	if err := qemu.Down(ctx, name); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, qemu.Down(context.WithoutCancel(ctx), name)) }()
	start := time.Now()
	c, err := devcluster.Start(ctx, out, qemu.Options{Name: name, Provisioner: provisioner, MemoryMiB: controlPlaneMiB}, made)
	if err != nil {
		return nil, err
	}
	how := c.Provisioner
	if c.Accelerator != "" {
		how += " (" + c.Accelerator + ")"
	}
	var reached []qemu.Milestone
	err = devcluster.AwaitReady(ctx, out, c, start, 0, func(m qemu.Milestone) {
		reached = append(reached, qemu.Milestone{What: m.What, After: time.Since(start)})
	})
	if err != nil {
		return nil, err
	}
	node := c.Nodes[0].Name
	figures, err := upTimes(how, c.Console(node))
	if err != nil {
		return nil, err
	}
	if c.Provisioner == qemu.QEMU {
		if err := judgeAPI(figures); err != nil {
			return nil, err
		}
	}
	for _, m := range reached {
		f := figure{what: how + ": power-on → " + m.What, value: seconds(m.After)}
		if provisioner == qemu.Container && m.What == qemu.MilestoneReady {
			f.budget, f.over = seconds(budgetReady), m.After > budgetReady
		}
		figures = append(figures, f)
	}
	if provisioner == qemu.QEMU {
		// It would not be here if it hadn't got Ready in that.
		figures = append(figures, figure{what: how + ": RAM of this control plane", value: fmt.Sprintf("%d MiB", controlPlaneMiB), budget: "≤ 2 GiB"})
	}
	if provisioner == qemu.Container {
		idle, err := idle(ctx, out, c)
		if err != nil {
			return nil, err
		}
		figures = append(figures, idle...)
		measured, err := benchAPI(ctx, out, root, c)
		if err != nil {
			return nil, err
		}
		figures = append(figures, measured...)
	}
	fmt.Fprintln(out)
	return figures, keepChart(ctx, out, c, how)
}

// judgeAPI holds the time at which apid was up against its budget.
func judgeAPI(figures []figure) error {
	for i := range figures {
		if f := &figures[i]; strings.HasSuffix(f.what, "→ apid") {
			took, err := time.ParseDuration(strings.ReplaceAll(f.value, " ", ""))
			f.budget, f.over = "≤ "+seconds(budgetAPI), took > budgetAPI
			return err
		}
	}
	return errors.New("apid didn't come up")
}

// keepChart prints the chart and saves the picture from the cluster's removal.
func keepChart(ctx context.Context, out io.Writer, c *qemu.Cluster, how string) error {
	fmt.Fprintf(out, "%s:\n", how)
	if err := printChart(ctx, out, c); err != nil {
		return err
	}
	data, err := os.ReadFile(c.Chart(c.Nodes[0].Name))
	if err != nil {
		return err
	}
	file := filepath.Join("out", "boot-chart-"+c.Provisioner+".svg")
	if err := os.WriteFile(file, data, 0o644); err != nil {
		return err
	}
	fmt.Fprintf(out, "as a picture: %s\n", file)
	return nil
}

// upLine is the console's line for a service that has just come up; the time is
// since the kernel's start, or since PID 1's in a container.
var upLine = regexp.MustCompile(`^\[ *(\d+\.\d+)\] \[garboard\] ([a-z]+): \S+ \(up\)`)

// anyLine is the first thing that PID 1 says.
var anyLine = regexp.MustCompile(`^\[ *(\d+\.\d+)\] \[garboard\] `)

// upTimes reads from the console when PID 1 first spoke and when each service
// came up.
func upTimes(how, console string) ([]figure, error) {
	f, err := os.Open(console)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var figures []figure
	seen := map[string]bool{}
	add := func(what, at string) error {
		if seen[what] {
			return nil
		}
		seen[what] = true
		s, err := strconv.ParseFloat(at, 64)
		figures = append(figures, figure{what: how + ": kernel start → " + what, value: fmt.Sprintf("%.1f s", s)})
		return err
	}
	s := bufio.NewScanner(f)
	for s.Scan() {
		line := strings.TrimRight(s.Text(), "\r")
		if m := anyLine.FindStringSubmatch(line); m != nil {
			if err := add("init", m[1]); err != nil {
				return nil, err
			}
		}
		if m := upLine.FindStringSubmatch(line); m != nil {
			if err := add(m[2], m[1]); err != nil {
				return nil, err
			}
		}
	}
	return figures, s.Err()
}

// idle is what PID 1 and its helpers take, and what the whole node takes, when nobody asks it for anything.
func idle(ctx context.Context, out io.Writer, c *qemu.Cluster) ([]figure, error) {
	fmt.Fprintf(out, "letting the node settle for %s, and counting its processor time for %s\n", settle, idleTime)
	err := pause(ctx, settle)
	processor, counted := processorTime(ctx, c)
	if err = errors.Join(err, counted); err != nil {
		return nil, err
	}
	var total int64
	for _, command := range []string{"", "apid", "trustd"} {
		pid, err := nodeInit(c, command)
		if err != nil {
			return nil, err
		}
		n, err := pss(pid)
		if err != nil {
			return nil, err
		}
		total += n
	}
	all, err := weigh(c, c.Nodes[0], "a one-node control plane")
	return []figure{bytesFigure("PID 1, apid and trustd, idle, proportional set size", total, budgetPSS), all, processor}, err
}

// processorTime is how much of a processor the whole node uses.
func processorTime(ctx context.Context, c *qemu.Cluster) (figure, error) {
	before, err := c.NodeCPUTime(c.Nodes[0].Name)
	began := time.Now()
	if err = errors.Join(err, pause(ctx, idleTime)); err != nil {
		return figure{}, err
	}
	after, err := c.NodeCPUTime(c.Nodes[0].Name)
	share := 100 * float64(after-before) / float64(time.Since(began))
	return figure{"processor time of a one-node control plane, idle", fmt.Sprintf("%.1f %% of a processor", share), fmt.Sprintf("≤ %d %%", budgetIdle), share > budgetIdle}, err
}

// nodeInit finds PID 1 of the first node of a cluster of containers, or with a command that program under it.
func nodeInit(c *qemu.Cluster, command string) (int, error) {
	pids, err := c.NodeProcesses(c.Nodes[0].Name)
	slices.Sort(pids) // PID 1 is the first
	for _, pid := range pids {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if strings.HasPrefix(string(line), "/sbin/init\x00"+command) {
			return pid, nil
		}
	}
	return 0, cmp.Or(err, fmt.Errorf("%s runs no /sbin/init %s", c.Nodes[0].Name, command))
}

func bytesFigure(what string, n, budget int64) figure {
	return figure{what: what, value: megabytes(n), budget: "≤ " + megabytes(budget), over: n > budget}
}

func megabytes(n int64) string { return fmt.Sprintf("%.1f MB", float64(n)/1e6) }

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }
