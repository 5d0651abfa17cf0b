package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
)

func (a *app) follower(node, id string, stop func(*apiv1.Operation) bool) *follower {
	return &follower{app: a, node: node, id: id, out: a.printer(), lastUpdate: time.Now(), stop: stop}
}

// again is the command with which the user goes on: rotate-ca also keeps the user's credentials valid.
func (f *follower) again(otherwise string) string { return cmp.Or(f.command, otherwise) }

// run prints an operation of a node from its start to its end, and asks the user its
// questions. It reconnects for as long as a machine may take to restart: the node
// continues meanwhile, or restarts as a part of the operation. The error is the one with
// which the operation ended.
//
// It stops earlier if stop returns true.
func (f *follower) run(ctx context.Context) error {
	a, id := f.app, f.id
	retries := map[string]*retryLog{f.node: {}, f.former: {}}
	for {
		node := f.node
		err := a.withClient(ctx, node, f.watch)
		f.stopAsking() // the next connection asks it again
		switch {
		case f.outputErr != nil:
			return f.outputErr
		case f.ended:
			return f.outcome()
		case ctx.Err() != nil:
			fmt.Fprintf(a.err, "%s: %s continues on the node: gbctl -n %s %s\n", node, id, node, f.again("operation attach "+id))
			return context.Canceled
		case err == nil:
			err = errors.New("the node has ended the stream: it shuts down or restarts its API")
		case f.last == nil || f.refused():
			return f.followError(err)
		}
		if time.Since(f.lastUpdate) > restartBudget {
			return f.followError(fmt.Errorf("no answer from the node for %s: %w", restartBudget, err))
		}
		retries[node].print(a.notes(), err)
		if f.former != "" { // it may have got that back
			f.node, f.former = f.former, f.node
		}
		if err := pause(ctx, pollInterval); err != nil {
			continue // the check of ctx ends the loop
		}
	}
}

// follower follows one operation.
type follower struct {
	app      *app
	node, id string
	out      *printer
	stop     func(*apiv1.Operation) bool // ends follow before the operation ends
	command  string                      // with which the user goes on; "": gbctl operation
	former   string                      // where the node was before it got another address
	// prepare is called before the user is asked a question. It may answer it.
	prepare func(ctx context.Context, o *apiv1.Operation) (answer string, err error)

	last       *apiv1.Operation // nil: no update yet
	streamErr  error            // of the last stream
	outputErr  error            // of writing the output
	cursor     uint64           // of the last event that was shown
	lastUpdate time.Time
	ended      bool

	// The question that the user is asked now, and the goroutine that asks.
	question string
	answers  sync.WaitGroup
	cancel   context.CancelFunc
}

// errStopped ends a stream before the node does.
var errStopped = errors.New("stopped")

// watch prints updates until the stream ends.
func (f *follower) watch(ctx context.Context, c *client.Client) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	f.streamErr = client.Receive(ctx, c.Operation.Watch, &apiv1.WatchOperationRequest{Id: f.id, After: f.cursor}, func(u *apiv1.OperationUpdate) error {
		f.lastUpdate, f.last = time.Now(), u.Operation
		if f.outputErr = f.show(u); f.outputErr != nil {
			return f.outputErr
		}
		for _, e := range u.Events {
			f.cursor = e.Cursor
		}
		f.ended = u.Operation.Ended != nil || f.stop(u.Operation)
		if f.ended {
			return errStopped
		}
		f.ask(ctx)
		return nil
	})
	return f.streamErr
}

// refused reports whether the node has refused to send more. All other errors can come
// from a node that restarts: a connection that breaks, or for a moment a machine that
// hasn't found its configuration yet.
func (f *follower) refused() bool {
	return connect.IsWireError(f.streamErr) && exitCode(f.streamErr) != codeUnreachable
}

// show prints the events since the last update.
func (f *follower) show(u *apiv1.OperationUpdate) error {
	if f.app.output == "json" {
		return writeLine(f.app, document(f.node, u))
	}
	var lines []string
	if u.Lost {
		lines = append(lines, "  … (earlier events are not available any more)")
	}
	for i, e := range u.Events {
		if e.Kind == apiv1.OperationEvent_KIND_ASKS && i == len(u.Events)-1 && u.Operation.Question != nil {
			continue // the prompt, which comes next, has the same text
		}
		lines = append(lines, here(f.node, eventLine(f.id, e)))
	}
	if len(lines) == 0 {
		return nil
	}
	return f.out.lines(f.node, lines)
}

// marks are the prefixes of the lines for the state of a step.
var marks = map[string]string{
	"running": "…", "done": "✓", "skipped": "-", "failed": "✗", "undoing": "↶", "undone": "↶",
}

func eventLine(id string, e *apiv1.OperationEvent) string {
	who := cmp.Or(e.Step, id)
	if e.Part != "" {
		who += " " + e.Part
	}
	switch e.Kind {
	case apiv1.OperationEvent_KIND_CHANGED:
		line := who
		if e.State != "running" || e.Step == "" {
			line += " " + e.State
		}
		if e.Step == "" && e.State == "failed" {
			return line // the error of the command has the reason
		}
		if e.Step != "" {
			line = "  " + cmp.Or(marks[e.State], "?") + " " + line
		}
		return withText(line, e.Text)
	case apiv1.OperationEvent_KIND_ANSWERED:
		return withText("    "+who+" has its answer", e.Text)
	case apiv1.OperationEvent_KIND_ASKS:
		return withText("    "+who+" asks", e.Text)
	}
	if e.Step == "" {
		return withText(who, e.Text)
	}
	if e.Part != "" {
		return "    " + withText(e.Part, e.Text)
	}
	return "    " + oneLine(e.Text)
}

func withText(line, text string) string {
	if text == "" {
		return line
	}
	return line + ": " + oneLine(text)
}

// outcome returns the error of an operation that has ended, or nil if it succeeded.
func (f *follower) outcome() error {
	if f.last.State == apiv1.Operation_STATE_DONE || f.last.Ended == nil {
		return nil
	}
	return exitf(codeFailed, "%s %s: %s", f.id, operationState(f.last), here(f.node, f.last.Error))
}

// followError is the error if an operation can't be followed any longer.
func (f *follower) followError(err error) error {
	if f.last == nil {
		return err
	}
	return fmt.Errorf("%s was %s at the last update, and may continue: %w", f.id, operationState(f.last), err)
}

// ask asks the user the question of the operation, or withdraws a question that was
// answered elsewhere.
func (f *follower) ask(ctx context.Context) {
	q := f.last.Question
	now := ""
	if q != nil {
		now = q.Step + " " + q.Id
	}
	if now == f.question {
		return
	}
	f.stopAsking()
	if f.question = now; q == nil {
		return
	}
	ctx, f.cancel = context.WithCancel(ctx)
	o := f.last
	f.answers.Go(func() { f.askUser(ctx, o) })
}

func (f *follower) stopAsking() {
	if f.cancel != nil {
		f.cancel()
	}
	f.answers.Wait()
	f.question, f.cancel = "", nil
}

// askUser asks until the node accepts the answer, or until the input ends.
func (f *follower) askUser(ctx context.Context, o *apiv1.Operation) {
	turn, lines := f.app.userInput()
	select {
	case turn <- struct{}{}: // one question at a time, for all nodes
		defer func() { <-turn }()
	case <-ctx.Done():
		return
	}
	if f.prepare != nil {
		text, err := f.prepare(ctx, o)
		switch {
		case err != nil:
			fmt.Fprintf(f.app.err, "%s: %s; %s waits for an answer: run the same command again\n", f.node, visible(err.Error()), f.id)
			return
		case text != "" && !f.send(ctx, o, text):
			return
		}
	}
	for {
		fmt.Fprintf(f.app.err, "%s: %s: ", f.node, visible(prompt(o.Question)))
		select {
		case <-ctx.Done():
			fmt.Fprintln(f.app.err)
			return
		case line, ok := <-lines:
			if !ok {
				fmt.Fprintf(f.app.err, "\n%s: %s waits for an answer: gbctl -n %s %s\n", f.node, f.id, f.node, f.again("operation answer "+f.id+" ANSWER"))
				return
			}
			if text := strings.TrimSpace(line); text != "" && !f.send(ctx, o, text) {
				return
			}
		}
	}
}

// send sends an answer. It returns whether the user must be asked again.
func (f *follower) send(ctx context.Context, o *apiv1.Operation, text string) (again bool) {
	err := f.app.withClient(ctx, f.node, func(ctx context.Context, c *client.Client) error {
		ctx, cancel := context.WithTimeout(ctx, f.app.timeout)
		defer cancel()
		return answerOperation(ctx, c, o, text)
	})
	if err == nil || ctx.Err() != nil {
		return false
	}
	fmt.Fprintf(f.app.err, "%s: %s\n", f.node, visible(err.Error()))
	return exitCode(err) == codeRefused
}

// userInput reads lines from standard input. It returns them, and a channel that makes
// sure that only one question is asked at a time. A line that was typed for a question
// that is over answers the next question.
func (a *app) userInput() (turn chan struct{}, lines <-chan string) {
	a.inputOnce.Do(func() {
		a.inputTurn = make(chan struct{}, 1)
		typed := make(chan string)
		a.inputLines = typed
		go func() { // ends with the input, or with the program
			defer close(typed)
			r := bufio.NewReader(io.LimitReader(a.in, maxInputBytes))
			for {
				line, err := r.ReadString('\n')
				if line != "" {
					typed <- line
				}
				if err != nil {
					return
				}
			}
		}()
	})
	return a.inputTurn, a.inputLines
}

// maxInputBytes limits what gbctl reads from standard input.
const maxInputBytes = 1 << 20
