package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

const (
	// refresh is the interval between requests to a node, also after a failed one.
	refresh = 2 * time.Second

	// dashboardTimeout limits these requests: the dashboard must show sooner than
	// --timeout that a node doesn't answer.
	dashboardTimeout = 5 * time.Second

	// pastLines and pastEvents are shown from before the start of the dashboard.
	pastLines  = 500
	pastEvents = 200
)

func (a *app) dashboardCommand() *cobra.Command {
	return command("dashboard", func(cmd *cobra.Command, _ []string) error { return a.dashboard(cmd.Context()) })
}

func (a *app) dashboard(ctx context.Context) error {
	if !interactive(a.in) || !interactive(a.out) {
		return usagef("the dashboard needs a terminal: in scripts and pipes use 'gbctl health', 'gbctl services' and 'gbctl logs -f'")
	}
	nodes, err := a.targets(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	f := &feeds{app: a, nodes: nodes, target: make(chan logTarget, 1)}
	program := tea.NewProgram(newDashboard(nodes, f.follow), tea.WithContext(ctx), tea.WithInput(a.in), tea.WithOutput(a.out), tea.WithoutSignalHandler())
	f.start(ctx, program.Send)
	_, err = program.Run()
	cancel()
	f.wg.Wait()
	if errors.Is(err, tea.ErrProgramKilled) && ctx.Err() != nil {
		return context.Canceled // a signal of another process; Ctrl-C is a key here
	}
	return err
}

// feeds send the data of the nodes to the screen, each node independently of the others.
type feeds struct {
	app    *app
	nodes  []string
	send   func(tea.Msg)
	wg     sync.WaitGroup
	target chan logTarget // holds the next one
}

// logTarget is the log that is shown. The number distinguishes targets that follow one
// another.
type logTarget struct {
	node    int
	service string
	number  int
}

// snapshot is the state of a node at a time. Parts that the node didn't send are nil.
type snapshot struct {
	node     int
	at       time.Time
	status   *apiv1.NodeStatusResponse
	services *apiv1.ListServicesResponse
	pods     *apiv1.ListResourcesResponse
	etcd     *apiv1.ListResourcesResponse
	err      error // of the first missing part
}

// eventsMsg has further events of a node. again: the node sends all events again, so the
// earlier ones are dropped.
type eventsMsg struct {
	node   int
	again  bool
	events []*apiv1.ServiceEvent
}

// linesMsg has further lines of a log. If err is set, there are none for now.
type linesMsg struct {
	target logTarget
	again  bool
	lines  []string
	lost   uint64
	err    error
}

func (f *feeds) start(ctx context.Context, send func(tea.Msg)) {
	f.send = send
	for i, node := range f.nodes {
		c, err := f.app.dial(node)
		if err != nil {
			f.wg.Go(func() { send(snapshot{node: i, at: time.Now(), err: err}) }) // a retry can't help
			continue
		}
		f.wg.Go(func() { f.watch(ctx, i, c) })
		f.wg.Go(func() { f.events(ctx, i, c) })
		context.AfterFunc(ctx, c.Close)
	}
	f.wg.Go(func() { f.logs(ctx) })
}

// watch requests the state of a node, until ctx ends.
func (f *feeds) watch(ctx context.Context, i int, c *client.Client) {
	for ctx.Err() == nil {
		f.send(f.fetch(ctx, i, c))
		_ = pause(ctx, refresh)
	}
}

// fetch requests all parts at the same time. Some of them may fail, depending on the role
// of the certificate and the release of the node.
func (f *feeds) fetch(ctx context.Context, i int, c *client.Client) snapshot {
	ctx, cancel := context.WithTimeout(ctx, min(dashboardTimeout, f.app.timeout))
	defer cancel()
	s := snapshot{node: i}
	resources := func(kind string, to **apiv1.ListResourcesResponse) func() error {
		return func() (err error) {
			*to, err = client.Unary(ctx, c.Resource.List, &apiv1.ListResourcesRequest{Type: kind})
			return err
		}
	}
	parts := []func() error{
		func() (err error) { s.services, err = services(&apiv1.ListServicesRequest{})(ctx, c); return err },
		func() (err error) { s.status, err = status(ctx, c); return err },
		resources("staticpodstatuses", &s.pods),
		resources("etcdstatuses", &s.etcd),
	}
	errs := parallel(len(parts), func(i int) error { return parts[i]() })
	if i := slices.IndexFunc(errs, func(err error) bool { return err != nil }); i >= 0 {
		s.err = f.requestError(ctx, c, errs[i])
	}
	s.at = time.Now()
	return s
}

// requestError explains an error for the screen.
func (f *feeds) requestError(ctx context.Context, c *client.Client, err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("no answer within %s", min(dashboardTimeout, f.app.timeout))
	}
	if broken(err) {
		if refusal := c.Refusal(ctx); refusal != nil && !errors.Is(refusal, context.DeadlineExceeded) {
			err = refusal
		}
	}
	return f.app.explain(c.Name, err)
}

func (f *feeds) events(ctx context.Context, i int, c *client.Client) {
	for ctx.Err() == nil {
		again := true
		_ = client.Receive(ctx, c.Service.Events, &apiv1.EventsRequest{Tail: pastEvents, Follow: true}, func(e *apiv1.ServiceEvent) error {
			f.send(eventsMsg{node: i, again: again, events: []*apiv1.ServiceEvent{e}})
			again = false
			return ctx.Err()
		}) // watch reports whether the node answers
		_ = pause(ctx, refresh)
	}
}

// follow changes the log that is shown. Only the screen calls it, so that it doesn't block.
func (f *feeds) follow(t logTarget) {
	select {
	case <-f.target: // nobody has followed the one before
	default:
	}
	f.target <- t
}

// logs follows one log at a time.
func (f *feeds) logs(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	stop := func() {}
	for {
		select {
		case <-ctx.Done():
			stop()
			return
		case t := <-f.target:
			stop()
			var streaming context.Context
			streaming, stop = context.WithCancel(ctx)
			wg.Go(func() { f.log(streaming, t) })
		}
	}
}

func (f *feeds) log(ctx context.Context, t logTarget) {
	c, err := f.app.dial(f.nodes[t.node])
	if err != nil {
		return // watch reports it
	}
	defer c.Close()
	for ctx.Err() == nil {
		again := true
		err = client.Receive(ctx, c.Log.Read, &apiv1.ReadLogRequest{Id: t.service, Tail: pastLines, Follow: true}, func(m *apiv1.LogChunk) error {
			f.send(linesMsg{target: t, again: again, lines: m.Lines, lost: m.Lost})
			again = false
			return ctx.Err()
		})
		if err != nil && ctx.Err() == nil {
			f.send(linesMsg{target: t, err: f.app.explain(c.Name, err)})
		}
		_ = pause(ctx, refresh)
	}
}

const (
	// keptLines and keptEvents limit how far the user can scroll back.
	keptLines  = 5000
	keptEvents = 1000
)

// dashboard is the model of the screen. Only messages change it: keys, sizes of the
// window, and data of the feeds.
type dashboard struct {
	nodes         []*nodeView
	current       int
	width, height int

	showEvents bool // instead of the log
	scroll     int  // number of lines below the screen

	follow func(logTarget)
	target logTarget // of the last follow
	lines  []string
	logErr error
}

// nodeView is the known state of one node.
type nodeView struct {
	name     string
	seen     snapshot  // the last one
	answered time.Time // time of the last answer
	selected string    // ID of the service: positions may change
	events   []*apiv1.ServiceEvent
}

func newDashboard(nodes []string, follow func(logTarget)) *dashboard {
	return &dashboard{follow: follow, nodes: ofEach(nodes, func(name string) *nodeView { return &nodeView{name: name} })}
}

func (d *dashboard) Init() tea.Cmd { return nil }

func (d *dashboard) View() tea.View {
	v := tea.NewView(d.frame())
	v.AltScreen = true
	v.WindowTitle = "gbctl dashboard"
	return v
}

func (d *dashboard) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		d.width, d.height = msg.Width, msg.Height
	case tea.KeyPressMsg:
		return d, d.key(msg.String())
	case snapshot:
		d.nodes[msg.node].update(msg)
		d.retarget()
	case eventsMsg:
		n := d.nodes[msg.node]
		if msg.again {
			n.events = nil
		}
		n.events = newest(append(n.events, msg.events...), keptEvents)
		if d.showEvents && msg.node == d.current {
			d.keepPosition(len(msg.events))
		}
	case linesMsg:
		d.read(msg)
	}
	return d, nil
}

// newest keeps the last entries of a list.
func newest[T any](list []T, most int) []T {
	if len(list) <= 2*most {
		return list
	}
	return slices.Clone(list[len(list)-most:])
}

// update stores a snapshot. While the node doesn't answer, it keeps the earlier parts:
// the screen shows their age.
func (n *nodeView) update(s snapshot) {
	if s.status != nil || s.services != nil {
		n.answered = s.at
	} else {
		s.status, s.services, s.pods, s.etcd = n.seen.status, n.seen.services, n.seen.pods, n.seen.etcd
	}
	n.seen = s
	if ids := n.ids(); len(ids) > 0 && !slices.Contains(ids, n.selected) {
		n.selected = ids[0]
	}
}

// unanswered reports whether the last request got no answer.
func (n *nodeView) unanswered() bool { return n.seen.err != nil && !n.answered.Equal(n.seen.at) }

func (n *nodeView) ids() []string { return serviceIDs(n.seen.services) }

func (d *dashboard) read(msg linesMsg) {
	if msg.target != d.target {
		return // of the previous log
	}
	d.logErr = msg.err
	if msg.err != nil {
		return
	}
	if msg.again {
		d.lines, d.scroll = nil, 0
	}
	if msg.lost > 0 {
		d.lines = append(d.lines, "("+strconv.FormatUint(msg.lost, 10)+" lines were lost: they were written too fast)")
	}
	d.lines = newest(append(d.lines, msg.lines...), keptLines)
	if !d.showEvents {
		d.keepPosition(len(msg.lines))
	}
}

// keepPosition keeps the scroll position when lines are added.
func (d *dashboard) keepPosition(lines int) {
	if d.scroll > 0 {
		d.scroll += lines
	}
}

// retarget follows the log of the selected service.
func (d *dashboard) retarget() {
	n := d.nodes[d.current]
	if n.selected == "" || d.target.number > 0 && d.target.node == d.current && d.target.service == n.selected {
		return
	}
	d.target = logTarget{node: d.current, service: n.selected, number: d.target.number + 1}
	d.lines, d.logErr, d.scroll = nil, nil, 0
	d.follow(d.target)
}

func (d *dashboard) key(key string) tea.Cmd {
	switch key {
	case "q", "ctrl+c", "esc":
		return tea.Quit
	case "right", "tab", "l":
		d.node(d.current + 1)
	case "left", "shift+tab", "h":
		d.node(d.current - 1)
	case "down", "j":
		d.service(1)
	case "up", "k":
		d.service(-1)
	case "e":
		d.showEvents, d.scroll = !d.showEvents, 0
	case "pgup", "b":
		d.scroll += d.room() - 1
	case "pgdown", "space":
		d.scroll = max(0, d.scroll-d.room()+1)
	case "end", "G":
		d.scroll = 0
	default:
		if n, err := strconv.Atoi(key); err == nil && n >= 1 && n <= len(d.nodes) {
			d.node(n - 1)
		}
	}
	d.scroll = max(0, min(d.scroll, len(d.tail())-d.room()))
	return nil
}

func (d *dashboard) node(i int) {
	if count := len(d.nodes); i != d.current {
		d.current = (i%count + count) % count
		d.scroll = 0
		d.retarget()
	}
}

func (d *dashboard) service(by int) {
	n := d.nodes[d.current]
	ids := n.ids()
	if len(ids) == 0 {
		return
	}
	at := slices.Index(ids, n.selected) + by
	n.selected = ids[max(0, min(at, len(ids)-1))]
	d.retarget()
}
