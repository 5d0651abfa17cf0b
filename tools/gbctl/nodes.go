package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	"github.com/spf13/cobra"
)

const (
	// defaultTimeout bounds one request: the slowest ones, applying a
	// configuration and looking for what is wrong, take a few seconds on a busy
	// node.
	defaultTimeout = 30 * time.Second

	// maxParallel bounds how many nodes are asked at the same time: a handshake takes
	// a millisecond of this machine's processor, and a few file descriptors.
	maxParallel = 32

	// progressDelay is after how long a person is told what is being waited for.
	progressDelay = 2 * time.Second
)

// app is what the commands share: the global flags, and where to write.
type app struct {
	in       io.Reader
	out, err io.Writer

	// running: the command line was understood.
	running bool

	nodes, endpoints []string
	contextName      string
	configPath       string
	output           string // -o of the command that runs
	timeout          time.Duration

	insecure    bool
	fingerprint string
	warned      sync.Map // nodes that were believed without

	loaded *client.Context

	// What a person types in answer to questions, from the first one on.
	inputOnce  sync.Once
	inputTurn  chan struct{}
	inputLines <-chan string
}

func (a *app) globalFlags(root *cobra.Command) {
	f := root.PersistentFlags()
	f.StringSliceVarP(&a.nodes, "nodes", "n", nil, "nodes to ask, by address or name, separated by commas")
	f.StringSliceVarP(&a.endpoints, "endpoints", "e", nil, "endpoints to use instead of the context's")
	f.StringVar(&a.contextName, "context", "", "context to use instead of the current one")
	f.StringVar(&a.configPath, "garboardconfig", "", "client configuration (default $GARBOARDCONFIG, or else ~/.garboard/config)")
	f.DurationVar(&a.timeout, "timeout", defaultTimeout, "how long one request to a node may take")
	_ = root.RegisterFlagCompletionFunc("context", a.completeContexts)
	_ = root.RegisterFlagCompletionFunc("nodes", a.completeNodes)
}

// outputs are the values of -o, by its default.
var outputs = map[string][]string{
	"table": {"table", "yaml", "json"},
	"text":  {"text", "json"},
}

func (a *app) checkFlags(cmd *cobra.Command) error {
	if a.timeout <= 0 {
		return fmt.Errorf("--timeout must be more than zero")
	}
	if a.fingerprint != "" && !a.insecure {
		return fmt.Errorf("--fingerprint is for --insecure: other nodes prove with a certificate who they are")
	}
	if f := cmd.Flags().Lookup("fingerprint"); f != nil && f.Changed && a.fingerprint == "" {
		return fmt.Errorf("--fingerprint is empty: leave it out to see which certificate the machine shows")
	}
	if a.insecure && len(a.nodes) == 0 {
		return fmt.Errorf("--insecure needs -n: a node in maintenance mode isn't in any client configuration")
	}
	if output := cmd.Flags().Lookup("output"); output != nil {
		// Of a command that writes a file, it is the file's name.
		formats, isFormat := outputs[output.DefValue]
		if a.output = output.Value.String(); isFormat && !slices.Contains(formats, a.output) {
			return fmt.Errorf("-o %s: must be one of %s", a.output, strings.Join(formats, ", "))
		}
	}
	return nil
}

// outputFlag gives a command -o.
func (a *app) outputFlag(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().StringP("output", "o", "table", "table, yaml or json")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "yaml", "json"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// insecureFlags give a command the way to nodes in maintenance mode.
func (a *app) insecureFlags(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().BoolVar(&a.insecure, "insecure", false, "for a node in maintenance mode: believe the certificate that it shows")
	cmd.Flags().StringVar(&a.fingerprint, "fingerprint", "", "with --insecure: the certificate that the node's console shows, and no other")
	return cmd
}

func (a *app) path() (string, error) {
	if a.configPath != "" {
		return a.configPath, nil
	}
	return client.DefaultPath()
}

// access is the context to use. It is nil, without an error, where none is
// needed and none is there.
func (a *app) access() (*client.Context, error) {
	if a.loaded != nil {
		return a.loaded, nil
	}
	path, err := a.path()
	if err != nil {
		return nil, err
	}
	config, err := client.Load(path)
	if a.insecure && errors.Is(err, fs.ErrNotExist) && a.contextName == "" {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	c, err := config.Current(a.contextName)
	if a.insecure && err != nil && a.contextName == "" {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w (%s)", err, path)
	}
	a.loaded = c
	return c, nil
}

// targets are the nodes that the command is for, each once.
func (a *app) targets(ctx context.Context) ([]string, error) {
	c, err := a.access()
	if err != nil {
		return nil, err
	}
	nodes := a.nodes
	if len(nodes) == 0 && len(a.endpoints) == 0 {
		nodes = c.Nodes
	}
	if len(nodes) == 0 {
		endpoints := a.endpoints
		if len(endpoints) == 0 {
			endpoints = c.Endpoints
		}
		if len(endpoints) == 0 {
			return nil, errors.New("no node to ask: name one with -n, or give the context endpoints with 'gbctl config endpoints'")
		}
		endpoint, err := c.Answering(ctx, endpoints)
		if err != nil {
			return nil, &exitError{codeUnreachable, fmt.Errorf("no endpoint answers:\n%w", err)}
		}
		nodes = []string{endpoint}
	}
	var once []string
	for _, node := range nodes {
		if node = strings.TrimSpace(node); node != "" && !slices.Contains(once, node) {
			once = append(once, node)
		}
	}
	if len(once) == 0 {
		return nil, usagef("-n names no node")
	}
	return once, nil
}

// single is the one node that a command is for whose output can't be told apart
// by node.
func (a *app) single(ctx context.Context, what string) (string, error) {
	nodes, err := a.targets(ctx)
	if err != nil {
		return "", err
	}
	if len(nodes) > 1 {
		return "", usagef("%s is for one node: name it with -n (now there are %s)", what, strings.Join(nodes, ", "))
	}
	return nodes[0], nil
}

// dial makes the client for a node.
func (a *app) dial(node string) (*client.Client, error) {
	c, err := a.access()
	if err != nil {
		return nil, err
	}
	if _, _, err := client.Address(node); err != nil {
		return nil, usagef("%w", err)
	}
	if a.insecure {
		return client.DialMaintenanceAs(c, node, a.fingerprint)
	}
	n, err := client.Dial(c, node)
	if err != nil { // only for want of a certificate that can be used
		return nil, &exitError{codeDenied, fmt.Errorf("%w (%s)", err, a.contextLabel())}
	}
	return n, nil
}

// withClient calls a node, and explains what goes wrong.
func (a *app) withClient(ctx context.Context, node string, call func(context.Context, *client.Client) error) error {
	c, err := a.dial(node)
	if err != nil {
		return err
	}
	defer c.Close()
	err = call(ctx, c)
	if a.insecure && a.fingerprint == "" && c.Shown() != "" {
		a.warn(node, c.Shown())
	}
	if broken(err) {
		if refusal := c.Refusal(ctx); refusal != nil {
			err = refusal
		}
	}
	return a.explain(node, err)
}

// broken tells whether a connection that was there has ended without an answer.
func broken(err error) bool {
	var answer *connect.Error
	var op *net.OpError
	var distrust *tls.CertificateVerificationError
	switch {
	case !errors.As(err, &answer), connect.IsWireError(err),
		errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded),
		errors.As(err, &op) && op.Op == "dial",
		errors.As(err, &distrust), errors.Is(err, client.ErrFingerprint):
		return false
	}
	// Depending on the moment, connect calls it one or another of these.
	return slices.Contains([]connect.Code{connect.CodeUnavailable, connect.CodeCanceled, connect.CodeUnknown}, answer.Code())
}

// answer is what one node said.
type answer[T any] struct {
	node  string
	value T
}

// gather asks all nodes at the same time, and returns what those that answered
// said, in the order in which they were named. The error is about the others.
func gather[T any](ctx context.Context, a *app, ask func(context.Context, *client.Client) (T, error)) ([]answer[T], error) {
	nodes, err := a.targets(ctx)
	if err != nil {
		return nil, err
	}
	waiting := a.waitFor(nodes)
	defer waiting.end()
	values := make([]T, len(nodes))
	err = a.each(ctx, nodes, func(ctx context.Context, i int, c *client.Client) (err error) {
		defer waiting.done(nodes[i])
		ctx, cancel := context.WithTimeout(ctx, a.timeout)
		defer cancel()
		values[i], err = ask(ctx, c)
		return err
	})
	var failed *nodeErrors
	errors.As(err, &failed)
	var answers []answer[T]
	for i, node := range nodes {
		if failed == nil || !slices.ContainsFunc(failed.failed, func(f nodeError) bool { return f.node == node }) {
			answers = append(answers, answer[T]{node, values[i]})
		}
	}
	return answers, err
}

// each calls all nodes at the same time. The error is nil or *nodeErrors.
func (a *app) each(ctx context.Context, nodes []string, call func(ctx context.Context, i int, c *client.Client) error) error {
	errs := make([]error, len(nodes))
	slots := make(chan struct{}, maxParallel)
	var wg sync.WaitGroup
	for i, node := range nodes {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			errs[i] = a.withClient(ctx, node, func(ctx context.Context, c *client.Client) error { return call(ctx, i, c) })
		})
	}
	wg.Wait()
	return collect(nodes, errs)
}

// request bounds one request to a node, and tells a person who has to wait for it.
func (a *app) request(ctx context.Context, node string) (context.Context, func()) {
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	waiting := a.waitFor([]string{node})
	return ctx, func() {
		waiting.end()
		cancel()
	}
}

// sequential calls the nodes one after another: where a person edits, or where what
// is done to all at the same time would be in the way of the cluster. A node that
// fails doesn't keep the next one from its turn.
func (a *app) sequential(ctx context.Context, call func(context.Context, *client.Client) error) error {
	nodes, err := a.targets(ctx)
	if err != nil {
		return err
	}
	errs := make([]error, len(nodes))
	for i, node := range nodes {
		if errs[i] = ctx.Err(); errs[i] == nil {
			errs[i] = a.withClient(ctx, node, call)
		}
	}
	return collect(nodes, errs)
}

// rolling is sequential for what takes a node out of its cluster: after one that failed,
// nothing is done to those that come after it. The cluster could do without one, and
// maybe not without two. A dry run shows all that would be done.
func (a *app) rolling(ctx context.Context, dryRun bool, call func(context.Context, *client.Client) error) error {
	if dryRun {
		return a.sequential(ctx, call)
	}
	nodes, err := a.targets(ctx)
	if err != nil {
		return err
	}
	errs := make([]error, len(nodes))
	failed := -1
	for i, node := range nodes {
		if errs[i] = ctx.Err(); errs[i] != nil {
			continue
		}
		if failed >= 0 {
			errs[i] = &exitError{exitCode(errs[failed]), fmt.Errorf("nothing was done: %s comes before it, and failed", nodes[failed])}
		} else if errs[i] = a.withClient(ctx, node, call); errs[i] != nil {
			failed = i
		}
	}
	return collect(nodes, errs)
}

func collect(nodes []string, errs []error) error {
	all := &nodeErrors{total: len(nodes)}
	for i, err := range errs {
		if err != nil {
			all.failed = append(all.failed, nodeError{nodes[i], err})
		}
	}
	if len(all.failed) == 0 {
		return nil
	}
	return all
}
