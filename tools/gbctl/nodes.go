package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
)

const (
	// defaultTimeout limits one request: the slowest ones, which apply a configuration or
	// diagnose a node, take a few seconds on a busy node.
	defaultTimeout = 30 * time.Second

	// maxParallel limits the number of simultaneous requests: a handshake takes a
	// millisecond of local processor time, and a few file descriptors.
	maxParallel = 32

	// progressDelay is the time after which gbctl prints what it waits for.
	progressDelay = 2 * time.Second
)

// app is the state that the commands share: the global flags, input and output.
type app struct {
	in       io.Reader
	out, err io.Writer

	args []string // of the command line
	// running: the command line is valid.
	running bool

	nodes, endpoints []string
	contextName      string
	configPath       string
	output           string // -o of the command that runs
	quiet, verbose   bool
	timeout          time.Duration

	all, yes    bool // --all and --yes of a command that stops something
	insecure    bool
	fingerprint string
	command     string   // if it is for control planes only
	warned      sync.Map // nodes for which the warning was printed

	loaded *client.Context

	// Lines from standard input, read from the first question on.
	inputOnce  sync.Once
	inputTurn  chan struct{}
	inputLines <-chan string
}

func (a *app) globalFlags(root *cobra.Command) {
	f := root.PersistentFlags()
	f.StringSliceVarP(&a.nodes, "nodes", "n", nil, "nodes, by address or name, separated by commas")
	f.StringSliceVarP(&a.endpoints, "endpoints", "e", nil, "endpoints to use instead of those of the context")
	f.StringVar(&a.contextName, "context", "", "context to use instead of the current one")
	f.StringVar(&a.configPath, "garboardconfig", "", "client configuration (default $GARBOARDCONFIG, or else ~/.garboard/config)")
	f.BoolVarP(&a.quiet, "quiet", "q", false, "no progress and no hints on standard error, only warnings, questions and errors")
	f.BoolVarP(&a.verbose, "verbose", "v", false, "write to standard error what gbctl does: the context, and each request to a node with its duration")
	f.DurationVar(&a.timeout, "timeout", defaultTimeout, "timeout of one request to a node")
	_ = root.RegisterFlagCompletionFunc("context", a.completeContexts)
	_ = root.RegisterFlagCompletionFunc("nodes", a.completeNodes)
}

func (a *app) checkFlags(cmd *cobra.Command) error {
	if isForControlPlanes(cmd) {
		a.command = cmd.CommandPath()
	}
	switch {
	case a.timeout <= 0:
		return errors.New("--timeout must be more than zero")
	case a.fingerprint != "" && !a.insecure:
		return errors.New("--fingerprint needs --insecure: other nodes prove their identity with a certificate")
	case cmd.Flags().Changed("fingerprint") && a.fingerprint == "":
		return errors.New("--fingerprint is empty: leave it out to see the certificate of the machine")
	case a.insecure && len(a.nodes) == 0:
		return errors.New("--insecure needs -n: name the node whose certificate nobody has signed")
	}
	if output := cmd.Flags().Lookup("output"); output != nil {
		a.output = output.Value.String()
	}
	return nil
}

// outputFlag adds -o to a command.
func (a *app) outputFlag(cmd *cobra.Command) *cobra.Command {
	choiceFlag(cmd, new(string), "output", "o", "table, yaml or json", "table", "yaml", "json")
	return cmd
}

// insecureFlags adds the flags for nodes without a signed certificate to a command.
func (a *app) insecureFlags(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().BoolVar(&a.insecure, "insecure", false, "for a node in maintenance mode, or a worker that waits for its certificate: accept a self-signed one")
	cmd.Flags().StringVar(&a.fingerprint, "fingerprint", "", "with --insecure: accept only the certificate with this fingerprint, which the node shows on its console")
	return cmd
}

// notes is where progress and hints go.
func (a *app) notes() io.Writer {
	if a.quiet {
		return io.Discard
	}
	return a.err
}

func (a *app) path() (string, error) {
	if a.configPath != "" {
		return a.configPath, nil
	}
	return client.DefaultPath()
}

// access returns the context to use. It is nil, without an error, if none exists and none
// is needed.
func (a *app) access() (*client.Context, error) {
	if a.loaded != nil {
		return a.loaded, nil
	}
	path, err := a.path()
	if err != nil {
		return nil, err
	}
	config, err := loadClient(path)
	if a.insecure && errors.Is(err, fs.ErrNotExist) && a.contextName == "" {
		return nil, nil
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &exitError{codeDenied, err}
	} else if err != nil {
		return nil, err
	}
	c, err := a.context(config, a.contextName)
	if a.insecure && err != nil && a.contextName == "" {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w (%s)", err, path)
	}
	a.loaded = c
	a.trace("%s: endpoints %s", a.contextLabel(), strings.Join(c.Endpoints, ", "))
	return c, nil
}

// context returns the context with a name, or the current one.
func (a *app) context(config *client.Config, name string) (*client.Context, error) {
	c, err := config.Current(name)
	switch {
	case err != nil && name == "":
		return nil, &exitError{codeDenied, err}
	case err != nil:
		return nil, a.closest(usagef("%w", err), name, slices.Collect(maps.Keys(config.Contexts)))
	}
	return c, nil
}

// targets returns the nodes of the command, without duplicates.
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
		endpoints := a.reach(c)
		if len(endpoints) == 0 {
			return nil, errors.New("no node given: use -n, or set the endpoints of the context with 'gbctl config endpoints'")
		}
		endpoint, err := c.Answering(ctx, endpoints)
		if err != nil {
			return nil, exitf(codeUnreachable, "no endpoint answers:\n%w", err)
		}
		nodes = []string{endpoint}
	}
	nodes = once(ofEach(nodes, strings.TrimSpace))
	if nodes = slices.DeleteFunc(nodes, func(node string) bool { return node == "" }); len(nodes) == 0 {
		return nil, usagef("-n is empty")
	}
	return nodes, nil
}

// reach are the endpoints to use of a context.
func (a *app) reach(c *client.Context) []string {
	if len(a.endpoints) == 0 && c != nil {
		return c.Endpoints
	}
	return a.endpoints
}

// stopFlags adds the flags of a command that stops something, and makes it ask for the nodes.
func (a *app) stopFlags(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&a.all, "all", false, "without -n: all nodes of the context, after a question")
	cmd.Flags().BoolVarP(&a.yes, "yes", "y", false, "don't ask; required without a terminal")
}

// named makes sure that the user means the nodes which a command is about to stop: they are named, there is only one,
// or it is all of them. Then it asks, unless the command has a question of its own.
func (a *app) named(ctx context.Context, command string, harmless, asks bool) error {
	c, err := a.access()
	if err != nil || len(a.nodes) > 0 || harmless {
		return err
	}
	var nodes []string
	if len(a.endpoints) == 0 && c != nil {
		nodes = c.Nodes
	}
	switch {
	case max(len(a.reach(c)), len(nodes)) < 2:
		return nil
	case a.all && len(nodes) == 0:
		return usagef("--all: the context has no list of its nodes; name them with -n, or set them with 'gbctl config nodes'")
	case !a.all && len(nodes) == 0:
		return usagef("nothing was done: '%s' stops what runs on a node; name it with -n", command)
	case !a.all:
		return usagef("nothing was done: '%s' stops what runs on a node, and the context has %s; name those to stop with -n, or use --all",
			command, strings.Join(nodes, ", "))
	case a.yes || asks:
		return nil
	case !interactive(a.in) || !interactive(a.err):
		return usagef("nothing was done: --all asks for confirmation, and standard input or standard error isn't a terminal; use --yes")
	}
	return a.ask(ctx, fmt.Sprintf("%s: %s?", strings.Join(nodes, ", "), command))
}

// single returns the node of a command that works with exactly one node.
func (a *app) single(ctx context.Context, what string) (string, error) {
	nodes, err := a.targets(ctx)
	if err != nil {
		return "", err
	}
	if len(nodes) > 1 {
		return "", usagef("%s works with one node only, not with %s: select one with -n", what, strings.Join(nodes, ", "))
	}
	return nodes[0], nil
}

// dial makes a client for a node.
func (a *app) dial(node string) (*client.Client, error) {
	c, err := a.access()
	if err != nil {
		return nil, err
	}
	if _, _, err := client.Address(node); err != nil {
		return nil, usagef("%w", err)
	}
	if a.insecure {
		n, err := client.DialMaintenance(c, node, a.fingerprint)
		return a.observed(n), err
	}
	n, err := client.Dial(c, node)
	if err != nil { // only if there is no usable certificate
		return nil, exitf(codeDenied, "%w (%s)", err, a.contextLabel())
	}
	if a.command != "" {
		noWorker(n, "'%s' is for control planes; name one with -n. If %s is one, another machine answers in its place", a.command, node)
	}
	return a.observed(n), nil
}

// observed traces the requests of a client.
func (a *app) observed(n *client.Client) *client.Client {
	if n != nil {
		n.Observe = func(method, address string, took time.Duration, err error) {
			a.trace("%s at %s: %s, %s, error: %v", n.Name, address, method, took.Round(time.Millisecond/10), err)
		}
	}
	return n
}

// trace writes what --verbose is about.
func (a *app) trace(format string, args ...any) {
	if a.verbose {
		fmt.Fprintf(a.err, "%s  %s\n", time.Now().Format("15:04:05.000"), fmt.Sprintf(format, args...))
	}
}

// withClient calls a function with a client for a node, and explains its error.
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

// broken reports whether an established connection has ended without an answer.
func broken(err error) bool {
	var answer *connect.Error
	var op *net.OpError
	var distrust *tls.CertificateVerificationError
	switch {
	case !errors.As(err, &answer), connect.IsWireError(err),
		errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded),
		errors.As(err, &op) && op.Op == "dial",
		errors.As(err, &distrust), errors.Is(err, client.ErrFingerprint), errors.Is(err, errWorker):
		return false
	}
	// Which of these codes connect uses depends on the moment.
	return slices.Contains([]connect.Code{connect.CodeUnavailable, connect.CodeCanceled, connect.CodeUnknown}, answer.Code())
}

// answer is the answer of one node.
type answer[T any] struct {
	node  string
	value T
}

// gather calls all nodes at the same time, and returns the answers in the order in which
// the nodes were given. The error is about the nodes that failed.
func gather[T any](ctx context.Context, a *app, ask func(context.Context, *client.Client) (T, error)) ([]answer[T], error) {
	nodes, err := a.targets(ctx)
	if err != nil {
		return nil, err
	}
	waiting := a.waitFor(nodes)
	defer waiting.end()
	values := make([]T, len(nodes))
	errs := parallel(len(nodes), func(i int) error {
		return a.withClient(ctx, nodes[i], func(ctx context.Context, c *client.Client) (err error) {
			defer waiting.done(nodes[i])
			ctx, cancel := context.WithTimeout(ctx, a.timeout)
			defer cancel()
			values[i], err = ask(ctx, c)
			return err
		})
	})
	var answers []answer[T]
	for i, node := range nodes {
		if errs[i] == nil {
			answers = append(answers, answer[T]{node, values[i]})
		}
	}
	return answers, collect(nodes, errs)
}

// each calls all nodes at the same time. The error is nil or *nodeErrors.
func (a *app) each(ctx context.Context, nodes []string, call func(ctx context.Context, i int, c *client.Client) error) error {
	return collect(nodes, parallel(len(nodes), func(i int) error {
		return a.withClient(ctx, nodes[i], func(ctx context.Context, c *client.Client) error { return call(ctx, i, c) })
	}))
}

// parallel calls do for 0 to n-1, maxParallel of them at the same time, and returns their
// errors.
func parallel(n int, do func(i int) error) []error {
	errs := make([]error, n)
	var g errgroup.Group
	g.SetLimit(maxParallel)
	for i := range n {
		g.Go(func() error {
			errs[i] = do(i)
			return nil
		})
	}
	_ = g.Wait()
	return errs
}

// request limits one request to a node, and prints a message if it takes long.
func (a *app) request(ctx context.Context, node string) (context.Context, func()) {
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	waiting := a.waitFor([]string{node})
	return ctx, func() {
		waiting.end()
		cancel()
	}
}

// asked is the answer of a node to a question, limited as by request.
func asked[A any](ctx context.Context, a *app, c *client.Client, ask question[A]) (A, error) {
	ctx, done := a.request(ctx, c.Name)
	defer done()
	return ask(ctx, c)
}

// limited limits a call as request does.
func (a *app) limited(call func(context.Context, *client.Client) error) func(context.Context, *client.Client) error {
	return func(ctx context.Context, c *client.Client) error {
		ctx, done := a.request(ctx, c.Name)
		defer done()
		return call(ctx, c)
	}
}

// sequential calls the nodes one after another: for editing, and for actions that would
// disturb the cluster if they ran on all nodes at the same time. It continues after a
// node that fails.
func (a *app) sequential(ctx context.Context, call func(context.Context, *client.Client) error) error {
	return a.rolling(ctx, true, call)
}

// rolling is sequential for actions that make a node unavailable in its cluster: it stops
// at the first node that fails, because the cluster may not work without two nodes. A dry
// run shows the plans of all nodes.
func (a *app) rolling(ctx context.Context, dryRun bool, call func(context.Context, *client.Client) error) error {
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
		if !dryRun && failed >= 0 {
			errs[i] = exitf(exitCode(errs[failed]), "nothing was done, because %s failed", nodes[failed])
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
