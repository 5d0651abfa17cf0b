package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/types/known/durationpb"
)

// tryTimeout is how long a change is tried by default: enough time to check that the node
// still answers, and to type the confirmation.
const tryTimeout = time.Minute

// modePrefix is what the modes have in the API before their names.
const modePrefix = "APPLY_MODE_"

// shortModes are the modes that have a flag of their own.
var shortModes = []string{"immediate", "on-reboot", "try"}

// configChange is how a command changes the configuration of nodes, with the flags of all such commands.
type configChange struct {
	app           *app
	done          string // patched
	modeName      string
	mode          apiv1.ApplyMode
	timeout, wait time.Duration // of a try, and until a node is healthy
	dryRun, force bool
	unsigned      bool // of apply-config
}

func (c *configChange) add(cmd *cobra.Command) {
	choiceFlag(cmd, &c.modeName, "mode", "", "auto, immediate, on-reboot, reboot or try", "auto", "immediate", "on-reboot", "reboot", "try")
	for _, mode := range shortModes {
		cmd.Flags().Bool(mode, false, "same as --mode="+mode)
	}
	cmd.MarkFlagsMutuallyExclusive(append(shortModes, "mode")...)
	cmd.Flags().DurationVar(&c.timeout, "try-timeout", tryTimeout, "with --mode=try: the time after which the change is undone, 10s to 1h")
	cmd.Flags().DurationVar(&c.wait, "wait", settleBudget, "with several nodes: wait until a node is healthy after a change without a reboot, at most this long, before the next one is changed")
	cmd.Flags().BoolVar(&c.force, "force", false, "change the node also if the cluster loses its quorum, or the node its last way to the network")
	cmd.Flags().BoolVar(&c.dryRun, "dry-run", false, "only show what would change")
	c.app.outputFlag(cmd)
}

// setMode is for when the flags are known.
func (c *configChange) setMode(cmd *cobra.Command) {
	for _, mode := range shortModes {
		if given, _ := cmd.Flags().GetBool(mode); given {
			c.modeName = mode
		}
	}
	c.mode = apiv1.ApplyMode(apiv1.ApplyMode_value[modePrefix+strings.ToUpper(strings.ReplaceAll(c.modeName, "-", "_"))])
	if c.mode == apiv1.ApplyMode_APPLY_MODE_TRY && cmd.Flags().Changed("timeout") && !cmd.Flags().Changed("try-timeout") {
		c.timeout, c.app.timeout = c.app.timeout, defaultTimeout
		fmt.Fprintln(c.app.err, "note: in --mode=try, the flag timeout is called --try-timeout now; the former name goes with the next release")
	}
}

// apply sends a document to a node. base is what it was made from. Keys that the node may
// lack are sent over a connection of their own: the node proves on it what it is.
func (c *configChange) apply(ctx context.Context, n *client.Client, document []byte, base *apiv1.GetConfigResponse) (*apiv1.ApplyConfigResponse, error) {
	ctx, done := c.app.request(ctx, n.Name)
	defer done()
	if key := givenKey(document, base); key != "" && !c.app.insecure {
		fresh, err := c.app.dial(n.Name)
		if err != nil {
			return nil, err
		}
		defer fresh.Close()
		noWorker(fresh, "the configuration has %s, and keys of the cluster are for control planes only. Remove them for a worker; "+
			"to make a control plane of it, use 'gbctl -n %s reset', and then 'gbctl -n %[2]s apply-config --insecure -f FILE'. If %[2]s is a control plane, another machine answers in its place", key, n.Name)
		n = fresh
	}
	c.checkSysctls(ctx, n, document)
	return client.Unary(ctx, n.Config.Apply, &apiv1.ApplyConfigRequest{
		Document: document, Mode: c.mode, TryTimeout: c.tryTimeout(), DryRun: c.dryRun, Base: base.GetDigest(), Force: c.force, Unsigned: c.unsigned,
	})
}

// checkSysctls warns of kernel parameters that a node doesn't have.
func (c *configChange) checkSysctls(ctx context.Context, n *client.Client, document []byte) {
	var doc struct {
		Machine struct{ Sysctls map[string]string }
	}
	_ = yaml.Unmarshal(document, &doc) // the node has a better error
	for _, name := range slices.Sorted(maps.Keys(doc.Machine.Sysctls)) {
		dir, base := path.Split("/proc/sys/" + config.SysctlPath(name))
		hint := "; a module that isn't loaded may have it"
		files, err := receiveAll(ctx, n.File.List, &apiv1.ListFilesRequest{Path: path.Clean(dir), Depth: 1})
		there := ofEach(files, (*apiv1.FileInfo).GetName)
		if best := config.Closest(base, there); best != "" {
			hint = "; did you mean " + strings.TrimSuffix(name, base) + best + "?"
		}
		if err == nil && !slices.Contains(there, base) || connect.CodeOf(err) == connect.CodeNotFound {
			fmt.Fprintf(c.app.err, "%s: %s machine.sysctls: the kernel has no parameter %s%s\n", n.Name, painted(c.app.err, "warning:"), name, hint)
		}
	}
}

// tryTimeout is unset in other modes than try: nodes refuse it there.
func (c *configChange) tryTimeout() *durationpb.Duration {
	if c.mode != apiv1.ApplyMode_APPLY_MODE_TRY {
		return nil
	}
	return durationpb.New(c.timeout)
}

// settleBudget is the default of --wait: a small machine restarts an API server in a minute
// or two.
const settleBudget = 5 * time.Minute

// onEach changes the nodes one after another. Each must be healthy again before the next
// one is changed: a configuration that is wrong must not reach a whole control plane.
func (c *configChange) onEach(cmd *cobra.Command, change func(context.Context, *client.Client) (*apiv1.ApplyConfigResponse, error)) error {
	c.setMode(cmd)
	nodes, err := c.app.targets(cmd.Context())
	if err != nil {
		return err
	}
	wait := len(nodes) > 1 && !c.dryRun && !c.app.insecure // a machine without a configuration isn't part of a cluster
	skipReason := ""
	return c.app.sequential(cmd.Context(), func(ctx context.Context, n *client.Client) error {
		if skipReason != "" {
			return exitf(codeRefused, "nothing was changed: %s", skipReason)
		}
		var before *apiv1.NodeStatusResponse
		if wait {
			var err error
			if before, err = c.app.probe(ctx, n.Name); err != nil {
				return err
			}
		}
		start := time.Now()
		m, err := change(ctx, n)
		if wait && mayHaveApplied(err) {
			skipReason = n.Name + " may reboot; the result of the change there is unknown"
		}
		if err != nil || m == nil {
			return err
		}
		if err := c.report(n.Name, m); err != nil || !wait {
			return err
		}
		switch {
		case !m.Reboot && (len(m.Changes) == 0 || m.Mode == apiv1.ApplyMode_APPLY_MODE_ON_REBOOT):
			return nil
		case !m.Reboot:
			if err = c.app.waitSettled(ctx, n.Name, before, c.wait); err != nil {
				skipReason = n.Name + " isn't healthy after the change"
			}
			return err
		case c.mode == apiv1.ApplyMode_APPLY_MODE_TRY:
			skipReason = fmt.Sprintf("%s reboots to try the change; confirm it there first", n.Name)
			return nil
		}
		if err := c.app.waitBack(ctx, n.Name, before.BootId, restartBudget, func(_ context.Context, s *apiv1.NodeStatusResponse) error { return healthyAs(before, s) }); err != nil {
			skipReason = n.Name + " isn't back after its reboot"
			return err
		}
		fmt.Fprintf(c.app.notes(), "%s: is back and healthy after %s\n", n.Name, span(time.Since(start)))
		return nil
	})
}

// waitSettled waits until a node is healthy after a change, as it was before. Its first look comes when the
// node has begun to act on the change.
func (a *app) waitSettled(ctx context.Context, node string, before *apiv1.NodeStatusResponse, budget time.Duration) error {
	if err := pause(ctx, pollInterval); err != nil {
		return err
	}
	return a.waitBack(ctx, node, "", budget, func(_ context.Context, s *apiv1.NodeStatusResponse) error { return healthyAs(before, s) })
}

// mayHaveApplied reports whether the node may have applied a change although the answer
// was lost, for example because the node went down before it answered.
func mayHaveApplied(err error) bool {
	var request *connect.Error
	return errors.As(err, &request) && !connect.IsWireError(err) || exitCode(err) == codeUnreachable
}

func (a *app) applyConfigCommand(use string, aliases ...string) *cobra.Command {
	change := &configChange{app: a, done: "applied"}
	var file string
	cmd := command(use+" -f FILE", func(cmd *cobra.Command, args []string) error {
		if len(args) == 1 && file != "" {
			return usagef("give exactly one configuration: -f FILE; %s is something else", args[0])
		} else if len(args) == 1 {
			file = args[0]
		}
		if file == "" {
			return usagef("no configuration given: use -f FILE")
		}
		if change.unsigned && !a.insecure {
			return usagef("--unsigned is for a machine in maintenance mode: with --insecure")
		}
		document, err := a.readInput(file)
		if err != nil {
			return err
		}
		return change.onEach(cmd, func(ctx context.Context, n *client.Client) (*apiv1.ApplyConfigResponse, error) {
			n, err := a.trusted(ctx, n, "the configuration, with the keys of the cluster,")
			if err != nil {
				return nil, err
			}
			defer n.Close()
			m, err := change.apply(ctx, n, document, nil)
			return m, inFile(file, err)
		})
	})
	cmd.Aliases = aliases
	cmd.Args = cobra.MaximumNArgs(1)
	cmd.Flags().StringVarP(&file, "file", "f", "", "file with the configuration, or - for standard input")
	cmd.Flags().BoolVar(&change.unsigned, "unsigned", false, "with --insecure and machine.install.unsigned in the file: install a system although nobody vouches for it")
	change.add(cmd)
	return a.insecureFlags(cmd)
}

// inFile adds the name of the file to the positions in a node's errors, so that editors
// and terminals can jump to them.
func inFile(file string, err error) error {
	answer, ok := errors.AsType[*connect.Error](err)
	if !ok || answer.Code() != connect.CodeInvalidArgument {
		return err
	}
	return &exitError{codeRefused, errors.New(place.ReplaceAllStringFunc(answer.Message(), func(at string) string {
		m := place.FindStringSubmatch(at)
		return fmt.Sprintf("%s:%s:%s: ", file, m[2], m[3])
	}))}
}

// ofMachineConfig makes a command, and the same command below it for those who name what it is about.
func ofMachineConfig(use string, make func(use string, aliases ...string) *cobra.Command) *cobra.Command {
	cmd := make(use)
	cmd.AddCommand(make("machineconfig", "mc", "machineconfigs"))
	return cmd
}

// readInput reads a document from a file or from standard input.
func (a *app) readInput(name string) ([]byte, error) {
	in := a.in
	if strings.Contains(name, "://") {
		return nil, usagef("%s: gbctl reads files: get it first, with 'curl -fsSLO %[1]s'", shellWord(name))
	}
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
	data, err := io.ReadAll(io.LimitReader(in, config.MaxSize+1))
	if err == nil && len(data) > config.MaxSize {
		err = fmt.Errorf("%s is larger than %d bytes, the limit for a configuration", name, config.MaxSize)
	}
	if err == nil {
		err = wrongKind(name, data, machineFile)
	}
	return data, err
}

// report prints the result of a change, or of its dry run.
func (c *configChange) report(node string, m *apiv1.ApplyConfigResponse) error {
	for _, w := range m.Warnings {
		fmt.Fprintf(c.app.err, "%s: %s %s\n", node, painted(c.app.err, "warning:"), here(node, visible(w)))
	}
	if c.app.output != "table" {
		return c.app.show([]*yaml.Node{document(node, m)}, true, nil)
	}
	var b strings.Builder
	if c.dryRun {
		fmt.Fprintf(&b, "dry run for mc at the node %s; nothing was changed:\n", node)
		for _, change := range m.Changes {
			describeChange(&b, change)
			if !c.app.insecure { // there is something that changes
				fmt.Fprintf(&b, "      %s\n", effect(change))
			}
		}
	} else {
		fmt.Fprintf(&b, "%s mc at the node %s\n", c.done, node)
	}
	for _, line := range c.outcome(node, m) {
		b.WriteString("  " + line + "\n")
	}
	for line := range strings.Lines(b.String()) {
		if _, err := fmt.Fprintln(c.app.out, visible(line)); err != nil {
			return err
		}
	}
	return nil
}

// effect describes what a changed field needs.
func effect(change *apiv1.ConfigChange) string {
	text := "applied without a restart"
	if id, ok := config.Effect(change.Effect).Service(); ok {
		text = "restarts " + id
	} else if change.Effect == string(config.Reboot) {
		text = "needs a reboot"
	}
	return strings.TrimSuffix(text+": "+change.Note, ": ")
}

func describeChange(b *strings.Builder, change *apiv1.ConfigChange) {
	switch config.Op(change.Kind) {
	case config.Added:
		fmt.Fprintf(b, "  + %s: %s\n", change.Path, change.New)
	case config.Removed:
		fmt.Fprintf(b, "  - %s: %s\n", change.Path, change.Old)
	default:
		fmt.Fprintf(b, "  ~ %s: %s -> %s\n", change.Path, change.Old, change.New)
	}
}

// outcome describes the mode in which the change was applied, what restarts, and what to
// do next.
func (c *configChange) outcome(node string, m *apiv1.ApplyConfigResponse) []string {
	if len(m.Changes) == 0 && m.Version == 0 && !m.Reboot {
		return []string{"nothing changes"}
	}
	if c.app.insecure && c.dryRun {
		return []string{"all of it would be set: the machine has no configuration"}
	}
	var lines []string
	switch m.Mode {
	case apiv1.ApplyMode_APPLY_MODE_ON_REBOOT:
		return []string{fmt.Sprintf("it takes effect at the next reboot: 'gbctl -n %s reboot'", node)}
	case apiv1.ApplyMode_APPLY_MODE_REBOOT:
		lines = append(lines, c.ifDryRun("the node reboots now to apply it", "the node would reboot"))
	case apiv1.ApplyMode_APPLY_MODE_TRY:
		if m.Reboot {
			lines = append(lines, c.ifDryRun("the node reboots now to try it", "the node would reboot"))
		}
		lines = append(lines, c.tryLines(node, m)...)
	default:
		if c.app.insecure {
			return []string{"the machine has its configuration; one that was booted from a medium installs itself now, and restarts",
				fmt.Sprintf("wait until the node is up: 'gbctl -n %s health --wait 10m'", node)}
		}
		lines = append(lines, c.ifDryRun("it is in effect, without a reboot", "it would take effect without a reboot"))
	}
	if len(m.Restarts) > 0 && !m.Reboot {
		lines = append(lines, c.ifDryRun("restarts: ", "would restart: ")+strings.Join(m.Restarts, ", "))
	}
	return lines
}

func (c *configChange) ifDryRun(done, would string) string {
	if c.dryRun {
		return would
	}
	return done
}

// tryLines describes until when a change is tried, and how to keep it.
func (c *configChange) tryLines(node string, m *apiv1.ApplyConfigResponse) []string {
	keep := fmt.Sprintf("keep it with 'gbctl -n %s config confirm'", node)
	switch {
	case c.dryRun:
		return []string{fmt.Sprintf("it would be undone after %s, unless confirmed", c.timeout)}
	case m.Reboot || m.TryUntil == nil:
		return []string{fmt.Sprintf("it is undone %s after the node is up again, unless confirmed", c.timeout), keep}
	}
	until := m.TryUntil.AsTime()
	return []string{fmt.Sprintf("it is undone at %s, in %s, unless confirmed", until.Local().Format("15:04:05"), span(time.Until(until))), keep}
}

var errRedacted = errors.New("the node returned its configuration without secrets, because your certificate doesn't have the role os:admin: a configuration without secrets can't be applied")

// current returns the configuration of a node, for a change of it.
func (a *app) current(ctx context.Context, n *client.Client) (*apiv1.GetConfigResponse, error) {
	m, err := asked(ctx, a, n, asking(ofConfig, configAPI.Get, &apiv1.GetConfigRequest{}))
	if err == nil && m.Redacted {
		err = &exitError{codeDenied, errRedacted}
	}
	return m, err
}
