package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config/patch"
	"github.com/spf13/cobra"
)

func (a *app) editCommand() *cobra.Command {
	change := &configChange{app: a, done: "edited"}
	mc := command("machineconfig", func(cmd *cobra.Command, _ []string) error {
		return change.onEach(cmd, func(ctx context.Context, n *client.Client) (*apiv1.ApplyConfigResponse, error) {
			return a.editNode(ctx, n, change)
		})
	})
	mc.Aliases = []string{"mc", "machineconfigs"}
	change.add(mc)
	return group("edit", mc)
}

// defaultEditor is available on almost every machine.
const defaultEditor = "vi"

// draft is the file with the configuration of one node during an edit.
type draft string

func newDraft(node string) (draft, error) {
	// MkdirTemp makes a directory that only the owner can open: the file contains
	// secrets.
	dir, err := os.MkdirTemp("", "gbctl-")
	if err != nil {
		return "", err
	}
	// Editors recognise YAML by the suffix.
	return draft(filepath.Join(dir, strings.ReplaceAll(node, ":", "_")+".yaml")), nil
}

// discard removes the draft, and other files of the editor beside it.
func (d draft) discard() { _ = os.RemoveAll(filepath.Dir(string(d))) }

// changed reports whether the file differs from the text that was shown.
func (d draft) changed(shown []byte) bool {
	now, err := os.ReadFile(string(d))
	return err == nil && !bytes.Equal(now, shown)
}

// keep adds the path of the draft to an error.
func (d draft) keep(err error) error { return &draftError{err, string(d)} }

// editNode opens the configuration of a node in the editor and applies the result. It
// returns nil if nothing was changed.
func (a *app) editNode(ctx context.Context, n *client.Client, change *configChange) (*apiv1.ApplyConfigResponse, error) {
	current, err := a.current(ctx, n)
	if err != nil {
		return nil, err
	}
	if current.Staged {
		fmt.Fprintf(a.err, "%s: note: another configuration is staged for the next reboot; this is the current one\n", n.Name)
	}
	d, err := newDraft(n.Name)
	if err != nil {
		return nil, err
	}
	text, problems := current.Document, ""
	for {
		shown := slices.Concat([]byte(problems), text)
		edited, err := d.edit(ctx, a, shown)
		if err != nil && bytes.Equal(text, current.Document) && !d.changed(shown) {
			d.discard() // there is no input to keep
			return nil, err
		}
		if err != nil {
			return nil, d.keep(err)
		}
		typed := stripProblems(edited)
		switch {
		case len(bytes.TrimSpace(typed)) == 0, bytes.Equal(typed, current.Document):
			fmt.Fprintf(a.out, "mc at the node %s is unchanged: nothing was applied\n", n.Name)
			d.discard()
			return nil, nil
		case problems != "" && bytes.Equal(typed, text):
			return nil, d.keep(&exitError{codeRefused, errors.New("the configuration still has problems: nothing was applied")})
		}
		text = typed
		m, err := change.apply(ctx, n, text, current)
		if err == nil {
			d.discard()
			return m, nil
		}
		switch connect.CodeOf(err) {
		case connect.CodeInvalidArgument, connect.CodeFailedPrecondition:
			problems = asComments(n.Name, err)
		case connect.CodeAborted:
			return nil, d.keep(errors.New("the configuration of the node was changed by somebody else in the meantime: edit again, and repeat your changes"))
		default:
			return nil, d.keep(a.explain(n.Name, err))
		}
	}
}

// edit opens a text in the editor, and returns the saved text.
func (d draft) edit(ctx context.Context, a *app, text []byte) ([]byte, error) {
	if err := os.WriteFile(string(d), text, 0o600); err != nil {
		return nil, err
	}
	editor := cmp.Or(os.Getenv("GARBOARD_EDITOR"), os.Getenv("EDITOR"), defaultEditor)
	if editor == defaultEditor && !interactive(a.in) {
		return nil, fmt.Errorf("%s needs a terminal; in scripts use 'gbctl patch mc'", editor)
	}
	// The variable may contain arguments, so the shell parses it. The editor isn't killed
	// together with gbctl: it owns the terminal and holds unsaved input.
	cmd := exec.Command("sh", "-c", editor+` "$@"`, editor, string(d))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = a.in, a.out, a.err
	err := cmd.Run()
	if ended, ok := errors.AsType[*exec.ExitError](err); ok && (ended.ExitCode() == codeInterrupted || !ended.Exited() && ended.Sys().(syscall.WaitStatus).Signal() == syscall.SIGINT) {
		// Ctrl-C goes to all processes of a terminal. The editor may exit first.
		return nil, context.Canceled
	}
	if err != nil {
		return nil, fmt.Errorf("editor %q: %w; set $GARBOARD_EDITOR to use another editor", editor, err)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return os.ReadFile(string(d))
}

// mark is the prefix of the lines that gbctl adds above the text.
const mark = "#! "

// place matches the position in an error.
var place = regexp.MustCompile(`(?m)^([^\s:]*):(\d+):(\d+): `)

// asComments formats the node's errors as comment lines above the text. It shifts the
// positions by the number of these lines, so that they are right in the shown file.
func asComments(node string, err error) string {
	reasons := err.Error()
	if answer, ok := errors.AsType[*connect.Error](err); ok {
		reasons = answer.Message()
	}
	lines := strings.Split(strings.TrimSpace(reasons), "\n")
	shift := len(lines) + 2
	var b strings.Builder
	fmt.Fprintf(&b, "%s%s refuses this configuration, nothing was applied:\n", mark, node)
	for _, line := range lines {
		line = place.ReplaceAllStringFunc(line, func(at string) string {
			m := place.FindStringSubmatch(at)
			n, _ := strconv.Atoi(m[2])
			return fmt.Sprintf("%s:%d:%s: ", m[1], n+shift, m[3])
		})
		b.WriteString(mark + "  " + line + "\n")
	}
	fmt.Fprintf(&b, "%sThese lines are removed automatically. Save without a change to give up.\n", mark)
	return b.String()
}

// stripProblems removes the lines that asComments added.
func stripProblems(text []byte) []byte {
	for bytes.HasPrefix(text, []byte(mark)) {
		_, rest, _ := bytes.Cut(text, []byte("\n"))
		text = rest
	}
	return text
}

// draftError is the error of an edit that couldn't be applied. The text of the user stays
// in a file, so that it isn't lost.
type draftError struct {
	err  error
	path string
}

func (e *draftError) Error() string { return e.err.Error() + "\n" + e.note() }
func (e *draftError) Unwrap() error { return e.err }
func (e *draftError) note() string  { return fmt.Sprintf("your edited text is in %s", e.path) }

func (a *app) patchCommand(use string, aliases ...string) *cobra.Command {
	change := &configChange{app: a, done: "patched"}
	var patches []string
	cmd := command(use+" -p PATCH", func(cmd *cobra.Command, _ []string) error {
		if len(patches) == 0 {
			return usagef("no patch given: use -p PATCH")
		}
		texts, err := patchTexts(patches, a.readInput)
		if err != nil {
			return err
		}
		return change.onEach(cmd, func(ctx context.Context, n *client.Client) (*apiv1.ApplyConfigResponse, error) {
			return a.patchNode(ctx, n, change, texts)
		})
	})
	cmd.Aliases = aliases
	// An array, not a slice: patches are full of commas.
	cmd.Flags().StringArrayVarP(&patches, "patch", "p", nil, "patch, or @FILE; repeatable, applied in the given order")
	change.add(cmd)
	return cmd
}

// patchNode patches the current configuration of a node. If somebody else changes it in
// between, it tries once more with the new configuration.
func (a *app) patchNode(ctx context.Context, n *client.Client, change *configChange, patches [][]byte) (*apiv1.ApplyConfigResponse, error) {
	for try := 1; ; try++ {
		current, err := a.current(ctx, n)
		if err != nil {
			return nil, err
		}
		text := current.Document
		for _, p := range patches {
			if text, err = patch.Apply(text, p); err != nil {
				return nil, &exitError{codeRefused, err}
			}
		}
		m, err := change.apply(ctx, n, text, current)
		if connect.CodeOf(err) != connect.CodeAborted || try > 1 {
			return m, err
		}
	}
}

// command makes a command. Its usage says which arguments it takes, and help.yaml has all other texts.
func command(use string, run func(cmd *cobra.Command, args []string) error) *cobra.Command {
	return &cobra.Command{Use: use, RunE: run}
}

// group makes a command that only has subcommands. Without a function, a misspelt subcommand
// would print the help and succeed.
func group(use string, inner ...*cobra.Command) *cobra.Command {
	cmd := command(use, func(cmd *cobra.Command, _ []string) error {
		return usagef("%s needs a subcommand: %s", cmd.CommandPath(), strings.Join(ofEach(cmd.Commands(), (*cobra.Command).Name), ", "))
	})
	cmd.AddCommand(inner...)
	return cmd
}

func (a *app) confirmCommand() *cobra.Command {
	return command("confirm", func(cmd *cobra.Command, _ []string) error {
		return a.sequential(cmd.Context(), a.limited(func(ctx context.Context, n *client.Client) error {
			_, err := n.Config.Confirm(ctx, connect.NewRequest(&apiv1.ConfirmConfigRequest{}))
			if err == nil {
				fmt.Fprintf(a.out, "confirmed mc at the node %s\n", n.Name)
			}
			return err
		}))
	})
}

func (a *app) historyCommand() *cobra.Command {
	head := []string{"VERSION", "CURRENT", "TIME", "BY", "MODE", "CHANGED"}
	return listCommand(a, "history", head, history, rowsOf((*apiv1.ConfigHistoryResponse).GetVersions, func(v *apiv1.ConfigVersion) []string {
		return []string{strconv.FormatUint(v.Version, 10), yes(v.Current), v.Time.AsTime().UTC().Format("2006-01-02T15:04:05Z"), v.By, word(v.Mode, modePrefix), v.Summary}
	}))
}

var history = asking(ofConfig, configAPI.History, &apiv1.ConfigHistoryRequest{})

// version parses the optional argument VERSION; 0 means none.
func version(args []string) (uint64, error) {
	if len(args) == 0 {
		return 0, nil
	}
	n, err := strconv.ParseUint(args[0], 10, 64)
	if err != nil || n == 0 {
		return 0, usagef("%q isn't a version; 'gbctl config history' lists them", args[0])
	}
	return n, nil
}

func (a *app) showCommand() *cobra.Command {
	r := &apiv1.GetConfigRequest{}
	cmd := command("show [VERSION]", func(cmd *cobra.Command, args []string) (err error) {
		if r.Version, err = version(args); err != nil {
			return err
		}
		return a.one(cmd.Context(), "config show", func(ctx context.Context, n *client.Client) error {
			m, err := client.Unary(ctx, n.Config.Get, r)
			if err != nil {
				return err
			}
			if m.TryUntil != nil {
				fmt.Fprintf(a.err, "%s: note: a change is being tried; it is undone at %s, unless confirmed with 'gbctl -n %s config confirm'\n", n.Name, stamp(m.TryUntil.AsTime()), n.Name)
			}
			if m.Staged {
				fmt.Fprintf(a.err, "%s: note: another configuration is staged for the next reboot\n", n.Name)
			}
			_, err = a.out.Write(m.Document)
			return err
		})
	})
	cmd.Flags().BoolVar(&r.Redact, "redact", false, "redact secrets")
	return cmd
}

func (a *app) rollbackCommand() *cobra.Command {
	change := &configChange{app: a, done: "rolled back"}
	cmd := command("rollback [VERSION]", func(cmd *cobra.Command, args []string) error {
		v, err := version(args)
		if err != nil {
			return err
		}
		return change.onEach(cmd, func(ctx context.Context, n *client.Client) (*apiv1.ApplyConfigResponse, error) {
			return asked(ctx, a, n, asking(ofConfig, configAPI.Rollback, &apiv1.RollbackConfigRequest{
				Version: v, Mode: change.mode, TryTimeout: change.tryTimeout(), DryRun: change.dryRun,
			}))
		})
	})
	change.add(cmd)
	return cmd
}
