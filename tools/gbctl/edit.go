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
	"github.com/spf13/cobra"
	"golang.org/x/term"
)

const editLong = `Edit the configuration of nodes: of several, one after another.

The editor is $GARBOARD_EDITOR, or else $EDITOR, or else vi. A text that wasn't
changed, or that is empty, isn't applied. What the node doesn't accept is opened
again, with the reasons above it; saving that unchanged gives up. Nothing that was
typed is lost: where it can't be applied, the file that it is in is named.
` + modesHelp

func (a *app) editCommand() *cobra.Command {
	edit := group(&cobra.Command{Use: "edit", Short: "Edit the configuration of nodes: edit machineconfig"})
	flags := &applyFlags{app: a}
	mc := &cobra.Command{
		Use:     "machineconfig",
		Aliases: []string{"mc", "machineconfigs"},
		Short:   "Edit the configuration of nodes",
		Long:    editLong,
		Example: `  gbctl -n 10.5.0.2 edit mc
  GARBOARD_EDITOR="code --wait" gbctl -n 10.5.0.2,10.5.0.3 edit mc --try`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			change, err := flags.change(cmd, "edited")
			if err != nil {
				return err
			}
			return change.onEach(cmd.Context(), func(ctx context.Context, n *client.Client) (*apiv1.ApplyConfigResponse, error) {
				return a.editNode(ctx, n, change)
			})
		},
	}
	flags.add(mc)
	edit.AddCommand(mc)
	return edit
}

// defaultEditor is on every machine.
const defaultEditor = "vi"

// draft is the configuration of one node while it is edited.
type draft struct {
	node string
	path string
}

func newDraft(node string) (*draft, error) {
	// MkdirTemp and CreateTemp make both for the owner alone: it holds secrets.
	dir, err := os.MkdirTemp("", "gbctl-")
	if err != nil {
		return nil, err
	}
	// Editors know YAML by its ending.
	return &draft{node, filepath.Join(dir, strings.ReplaceAll(node, ":", "_")+".yaml")}, nil
}

// discard removes the draft, with what an editor has left beside it.
func (d *draft) discard() { _ = os.RemoveAll(filepath.Dir(d.path)) }

// changed tells whether the file holds something else than what was shown.
func (d *draft) changed(shown []byte) bool {
	now, err := os.ReadFile(d.path)
	return err == nil && !bytes.Equal(now, shown)
}

// keep says where the draft is.
func (d *draft) keep(err error) error { return &draftError{err, d.path} }

// editNode has the configuration of a node edited, and applies it. Without an answer
// nothing was changed.
func (a *app) editNode(ctx context.Context, n *client.Client, change configChange) (*apiv1.ApplyConfigResponse, error) {
	current, err := a.current(ctx, n)
	if err != nil {
		return nil, err
	}
	if current.Staged {
		fmt.Fprintf(a.err, "%s: note: another configuration waits for the next reboot; it isn't what is edited now\n", n.Name)
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
			d.discard() // nobody has typed anything
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
		m, err := change.apply(ctx, n, text, current.Digest)
		if err == nil {
			d.discard()
			return m, nil
		}
		switch connect.CodeOf(err) {
		case connect.CodeInvalidArgument, connect.CodeFailedPrecondition:
			problems = asComments(n.Name, err)
		case connect.CodeAborted:
			return nil, d.keep(errors.New("the node has another configuration by now, somebody else has changed it: edit again, and take your changes over"))
		default:
			return nil, d.keep(a.explain(n.Name, err))
		}
	}
}

// edit shows a text in the editor, and returns what was saved.
func (d *draft) edit(ctx context.Context, a *app, text []byte) ([]byte, error) {
	if err := os.WriteFile(d.path, text, 0o600); err != nil {
		return nil, err
	}
	editor := cmp.Or(os.Getenv("GARBOARD_EDITOR"), os.Getenv("EDITOR"), defaultEditor)
	if f, ok := a.in.(*os.File); editor == defaultEditor && !(ok && term.IsTerminal(int(f.Fd()))) {
		return nil, fmt.Errorf("%s needs a terminal; programs change configurations with 'gbctl patch mc'", editor)
	}
	// People put arguments into the variable: it is a command line of the shell.
	// It isn't killed with us: it has the terminal, and what was typed so far.
	cmd := exec.Command("sh", "-c", editor+` "$@"`, editor, d.path)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = a.in, a.out, a.err
	err := cmd.Run()
	var ended *exec.ExitError
	if errors.As(err, &ended) && (ended.ExitCode() == codeInterrupted || !ended.Exited() && ended.Sys().(syscall.WaitStatus).Signal() == syscall.SIGINT) {
		// Ctrl-C goes to all programs of a terminal. The editor may be faster.
		return nil, context.Canceled
	}
	if err != nil {
		return nil, fmt.Errorf("editor %q: %w; $GARBOARD_EDITOR chooses another one", editor, err)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return os.ReadFile(d.path)
}

// mark starts the lines that are ours, and not the user's.
const mark = "#! "

// place is how problems tell where they are.
var place = regexp.MustCompile(`(?m)^([^\s:]*):(\d+):(\d+): `)

// asComments puts the node's reasons into lines that stand above the text. Places
// are moved down by as many lines: they are right in the file as it is shown.
func asComments(node string, err error) string {
	reasons := err.Error()
	var answer *connect.Error
	if errors.As(err, &answer) {
		reasons = answer.Message()
	}
	lines := strings.Split(strings.TrimSpace(reasons), "\n")
	shift := len(lines) + 2
	var b strings.Builder
	fmt.Fprintf(&b, "%s%s doesn't accept this, nothing was applied:\n", mark, node)
	for _, line := range lines {
		line = place.ReplaceAllStringFunc(line, func(at string) string {
			m := place.FindStringSubmatch(at)
			n, _ := strconv.Atoi(m[2])
			return fmt.Sprintf("%s:%d:%s: ", m[1], n+shift, m[3])
		})
		b.WriteString(mark + "  " + line + "\n")
	}
	fmt.Fprintf(&b, "%sThese lines go away by themselves. Save without a change to give up.\n", mark)
	return b.String()
}

// stripProblems takes our lines away again.
func stripProblems(text []byte) []byte {
	for bytes.HasPrefix(text, []byte(mark)) {
		_, rest, _ := bytes.Cut(text, []byte("\n"))
		text = rest
	}
	return text
}
