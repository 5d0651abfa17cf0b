package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"
	"gopkg.in/yaml.v3"
)

// tryTimeout is how long a change is tried: enough to see whether the node still
// answers, and to type the confirmation.
const tryTimeout = time.Minute

const modesHelp = `
--mode says when a change comes into force:

  auto       without a reboot if no changed field needs one (the default)
  immediate  without a reboot, or not at all (--immediate)
  on-reboot  with the next reboot, whenever that is (--on-reboot)
  reboot     with a reboot now, whatever has changed
  try        now, and undone after --timeout, also across a reboot, unless
             'gbctl config confirm' says to keep it (--try): for changes that may
             cut you off

Of several nodes, one that reboots is waited for until it is back and well; before it
is, nothing is done to the next. A change that takes a reboot is tried on one at a time.
--dry-run shows what would change, and what each field takes.`

var modes = map[string]apiv1.ApplyMode{
	"auto":      apiv1.ApplyMode_APPLY_MODE_AUTO,
	"immediate": apiv1.ApplyMode_APPLY_MODE_IMMEDIATE,
	"on-reboot": apiv1.ApplyMode_APPLY_MODE_ON_REBOOT,
	"reboot":    apiv1.ApplyMode_APPLY_MODE_REBOOT,
	"try":       apiv1.ApplyMode_APPLY_MODE_TRY,
}

// applyFlags are those of all commands that change the configuration (S-036).
type applyFlags struct {
	app                      *app
	mode                     string
	immediate, onReboot, try bool
	timeout                  time.Duration
	dryRun                   bool
}

func (f *applyFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.mode, "mode", "auto", "auto, immediate, on-reboot, reboot or try")
	cmd.Flags().BoolVar(&f.immediate, "immediate", false, "same as --mode=immediate")
	cmd.Flags().BoolVar(&f.onReboot, "on-reboot", false, "same as --mode=on-reboot")
	cmd.Flags().BoolVar(&f.try, "try", false, "same as --mode=try")
	cmd.Flags().DurationVar(&f.timeout, "timeout", tryTimeout, "with --mode=try: undo it after so long, 10s to 1h (in other modes: how long the request may take)")
	cmd.Flags().BoolVar(&f.dryRun, "dry-run", false, "only show what would change")
	_ = cmd.RegisterFlagCompletionFunc("mode", cobra.FixedCompletions([]string{"auto", "immediate", "on-reboot", "reboot", "try"}, cobra.ShellCompDirectiveNoFileComp))
	f.app.outputFlag(cmd)
}

// selectedMode is the one mode that the flags ask for.
func (f *applyFlags) selectedMode(cmd *cobra.Command) (apiv1.ApplyMode, error) {
	var asked []string
	if cmd.Flags().Changed("mode") {
		asked = append(asked, f.mode)
	}
	for _, short := range []struct {
		given bool
		mode  string
	}{{f.immediate, "immediate"}, {f.onReboot, "on-reboot"}, {f.try, "try"}} {
		if short.given {
			asked = append(asked, short.mode)
		}
	}
	switch len(asked) {
	case 0:
		asked = []string{"auto"}
	case 1:
	default:
		return 0, usagef("a change has one mode, not %s", strings.Join(asked, " and "))
	}
	mode, ok := modes[asked[0]]
	if !ok {
		return 0, usagef("--mode %s: must be auto, immediate, on-reboot, reboot or try", asked[0])
	}
	if mode != modes["try"] && cmd.Flags().Changed("timeout") {
		f.app.timeout = f.timeout
	}
	return mode, nil
}

// configChange is what a command is about to do to the configuration of nodes.
type configChange struct {
	app    *app
	done   string // patched
	mode   apiv1.ApplyMode
	try    time.Duration
	dryRun bool
}

func (f *applyFlags) change(cmd *cobra.Command, done string) (configChange, error) {
	mode, err := f.selectedMode(cmd)
	return configChange{f.app, done, mode, f.timeout, f.dryRun}, err
}

// apply sends a document to a node. base is the digest of what it was made from.
func (c configChange) apply(ctx context.Context, n *client.Client, document []byte, base string) (*apiv1.ApplyConfigResponse, error) {
	ctx, done := c.app.request(ctx, n.Name)
	defer done()
	return message(n.Config.Apply(ctx, connect.NewRequest(&apiv1.ApplyConfigRequest{
		Document: document, Mode: c.mode, TryTimeout: c.tryTimeout(), DryRun: c.dryRun, Base: base,
	})))
}

// tryTimeout is only for mode try: nodes refuse it in others.
func (c configChange) tryTimeout() *durationpb.Duration {
	if c.mode != apiv1.ApplyMode_APPLY_MODE_TRY {
		return nil
	}
	return durationpb.New(c.try)
}

// onEach changes the nodes one after another. One that reboots is out of its cluster until
// it is back: by then the cluster could do without another one, and not before.
func (c configChange) onEach(ctx context.Context, change func(context.Context, *client.Client) (*apiv1.ApplyConfigResponse, error)) error {
	nodes, err := c.app.targets(ctx)
	if err != nil {
		return err
	}
	wait := len(nodes) > 1 && !c.dryRun && !c.app.insecure // a machine without a configuration is in no cluster
	skipReason := ""
	return c.app.sequential(ctx, func(ctx context.Context, n *client.Client) error {
		if skipReason != "" {
			return &exitError{codeRefused, fmt.Errorf("nothing was done: %s", skipReason)}
		}
		before := ""
		if wait {
			s, err := c.app.probe(ctx, n.Name)
			if err != nil {
				return err
			}
			before = s.BootId
		}
		start := time.Now()
		m, err := change(ctx, n)
		if wait && mayHaveApplied(err) {
			skipReason = n.Name + " comes before it, and may reboot: what became of the change there isn't known"
		}
		if err != nil || m == nil {
			return err
		}
		if err := c.report(n.Name, m); err != nil || !m.Reboot || !wait {
			return err
		}
		if c.mode == apiv1.ApplyMode_APPLY_MODE_TRY {
			skipReason = fmt.Sprintf("%s reboots to try it; confirm it there before it is tried here", n.Name)
			return nil
		}
		if err := c.app.waitBack(ctx, n.Name, before, func(context.Context) error { return nil }); err != nil {
			skipReason = n.Name + " comes before it, and isn't back"
			return err
		}
		fmt.Fprintf(c.app.err, "%s: is back and well after %s\n", n.Name, span(time.Since(start)))
		return nil
	})
}

// mayHaveApplied tells whether a request may have done what it asked for, and the answer is
// lost, as where the node is quicker in going down.
func mayHaveApplied(err error) bool {
	var request *connect.Error
	return errors.As(err, &request) && !connect.IsWireError(err) || exitCode(err) == codeUnreachable
}

const applyLong = `Give nodes a configuration from a file ('-' reads it from standard input).

A node that has none yet is in maintenance mode: --insecure talks to it, and
--fingerprint with what its console shows makes sure that it is the right one.
Without --fingerprint the one that the machine shows is printed before anything
is sent, and on a terminal you are asked: a configuration holds the cluster's keys.
` + modesHelp

const applyExample = `  gbctl -n 10.5.0.2 apply-config --insecure -f controlplane.yaml
  gbctl -n 10.5.0.2 apply-config -f controlplane.yaml --dry-run
  gbctl -n 10.5.0.3 apply-config -f worker.yaml --mode=try --timeout 2m`

func (a *app) applyConfigCommand(use string, aliases ...string) *cobra.Command {
	flags := &applyFlags{app: a}
	var file string
	cmd := &cobra.Command{
		Use:     use + " -f FILE",
		Aliases: aliases,
		Short:   "Give nodes a configuration from a file",
		Long:    applyLong,
		Example: applyExample,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			change, err := flags.change(cmd, "applied")
			if err != nil {
				return err
			}
			if file == "" {
				return usagef("name the configuration: -f FILE")
			}
			document, err := a.readInput(file)
			if err != nil {
				return err
			}
			return change.onEach(cmd.Context(), func(ctx context.Context, n *client.Client) (*apiv1.ApplyConfigResponse, error) {
				n, err := a.trusted(ctx, n)
				if err != nil {
					return nil, err
				}
				defer n.Close()
				m, err := change.apply(ctx, n, document, "")
				return m, inFile(file, err)
			})
		},
	}
	cmd.Flags().StringVarP(&file, "file", "f", "", "the configuration")
	flags.add(cmd)
	return a.insecureFlags(cmd)
}

// inFile puts the name of the file into what a node says about its lines, so that
// editors and terminals find them.
func inFile(file string, err error) error {
	var answer *connect.Error
	if connect.CodeOf(err) != connect.CodeInvalidArgument || !errors.As(err, &answer) {
		return err
	}
	return &exitError{codeRefused, errors.New(place.ReplaceAllStringFunc(answer.Message(), func(at string) string {
		m := place.FindStringSubmatch(at)
		return fmt.Sprintf("%s:%s:%s: ", file, m[2], m[3])
	}))}
}

// applyCommand is the other way to say apply-config (S-024).
func (a *app) applyCommand() *cobra.Command {
	cmd := group(&cobra.Command{Use: "apply", Short: "Same as apply-config: apply machineconfig -f FILE"})
	cmd.AddCommand(a.applyConfigCommand("machineconfig", "mc", "machineconfigs"))
	return cmd
}

// readInput reads a document from a file or from standard input.
func (a *app) readInput(name string) ([]byte, error) {
	in := a.in
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
		err = fmt.Errorf("%s is larger than the %d bytes that a configuration may have", name, config.MaxSize)
	}
	return data, err
}

// report says what has become of a change, or would.
func (c configChange) report(node string, m *apiv1.ApplyConfigResponse) error {
	for _, w := range m.Warnings {
		fmt.Fprintf(c.app.err, "%s: warning: %s\n", node, visible(w))
	}
	if c.app.output != "table" {
		return c.app.show([]*yaml.Node{document(node, m)}, true, nil)
	}
	var b strings.Builder
	if c.dryRun {
		fmt.Fprintf(&b, "mc at the node %s would change so, and hasn't:\n", node)
		for _, change := range m.Changes {
			describeChange(&b, change)
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

// effect says what a changed field takes.
func effect(change *apiv1.ConfigChange) string {
	text := "at once"
	if id, ok := config.Effect(change.Effect).Service(); ok {
		text = "restarts " + id
	} else if change.Effect == string(config.Reboot) {
		text = "needs a reboot"
	}
	if change.Note != "" {
		text += ": " + change.Note
	}
	return text
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
	fmt.Fprintf(b, "      %s\n", effect(change))
}

// outcome says in which mode it was taken, what restarts, and what is to be done.
func (c configChange) outcome(node string, m *apiv1.ApplyConfigResponse) []string {
	if len(m.Changes) == 0 && m.Version == 0 && !m.Reboot {
		return []string{"nothing changes"}
	}
	var lines []string
	switch m.Mode {
	case apiv1.ApplyMode_APPLY_MODE_ON_REBOOT:
		return []string{fmt.Sprintf("it comes into force with the next reboot: 'gbctl -n %s reboot'", node)}
	case apiv1.ApplyMode_APPLY_MODE_REBOOT:
		lines = append(lines, c.ifDryRun("the node reboots now, to bring it into force", "the node would reboot"))
	case apiv1.ApplyMode_APPLY_MODE_TRY:
		if m.Reboot {
			lines = append(lines, c.ifDryRun("the node reboots now, to try it", "the node would reboot"))
		}
		lines = append(lines, c.tryLines(node, m)...)
	default:
		lines = append(lines, c.ifDryRun("it is in force, without a reboot", "it would be in force without a reboot"))
	}
	if c.app.insecure && !c.dryRun {
		lines = append(lines, fmt.Sprintf("see how it comes up: 'gbctl -n %s health --wait 10m'", node))
	}
	if len(m.Restarts) > 0 && !m.Reboot {
		restarts := strings.Join(m.Restarts, ", ")
		lines = append(lines, c.ifDryRun("restarts: "+restarts, "would restart: "+restarts))
	}
	return lines
}

func (c configChange) ifDryRun(done, would string) string {
	if c.dryRun {
		return would
	}
	return done
}

// tryLines says how to keep a change that is tried, and until when.
func (c configChange) tryLines(node string, m *apiv1.ApplyConfigResponse) []string {
	keep := fmt.Sprintf("keep it with 'gbctl -n %s config confirm'", node)
	switch {
	case c.dryRun:
		return []string{fmt.Sprintf("it would be undone after %s, unless confirmed", c.try)}
	case m.Reboot || m.TryUntil == nil:
		return []string{fmt.Sprintf("it is undone %s after the node is up again, unless confirmed", c.try), keep}
	}
	until := m.TryUntil.AsTime()
	return []string{fmt.Sprintf("it is undone at %s, in %s, unless confirmed", until.Local().Format("15:04:05"), span(time.Until(until))), keep}
}

var errRedacted = errors.New("the node shows its configuration with its secrets left out, because the certificate in use isn't an administrator's (os:admin): it can't be changed so")

// current is the configuration of a node, to be changed.
func (a *app) current(ctx context.Context, n *client.Client) (*apiv1.GetConfigResponse, error) {
	ctx, done := a.request(ctx, n.Name)
	defer done()
	m, err := message(n.Config.Get(ctx, connect.NewRequest(&apiv1.GetConfigRequest{})))
	if err == nil && m.Redacted {
		err = &exitError{codeDenied, errRedacted}
	}
	return m, err
}
