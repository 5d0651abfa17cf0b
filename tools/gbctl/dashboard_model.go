package main

import (
	"slices"
	"strconv"
	"time"

	tea "charm.land/bubbletea/v2"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
)

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
