package main

import (
	"fmt"
	"slices"
	"strings"
	"unicode"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"go.yaml.in/yaml/v3"
)

// The smallest window with room for a row of each part.
const (
	leastWidth  = 40
	leastHeight = 12
)

// Styles use the colours of the terminal's palette. All information is also there as
// text.
var (
	strong   = lipgloss.NewStyle().Bold(true)
	faint    = lipgloss.NewStyle().Faint(true)
	reversed = lipgloss.NewStyle().Reverse(true)
	good     = lipgloss.NewStyle().Foreground(lipgloss.Green)
	wait     = lipgloss.NewStyle().Foreground(lipgloss.Yellow)
	bad      = lipgloss.NewStyle().Foreground(lipgloss.Red)
)

const keysHelp = "←→ node  ↑↓ service  e events/log  PgUp PgDn scroll  End follow  q quit"

// layout is the number of rows of the two lists.
type layout struct{ services, below int }

// fixedRows are: nodes, identity, load, control plane, two headings and the keys.
const fixedRows = 7

func (d *dashboard) layout() layout {
	room := max(2, d.height-fixedRows)
	services := max(1, min(len(d.nodes[d.current].seen.services.GetServices()), room*3/5))
	return layout{services: services, below: room - services}
}

// frame is the whole screen: height rows, at most width columns.
func (d *dashboard) frame() string {
	if d.width == 0 {
		return ""
	}
	if d.width < leastWidth || d.height < leastHeight {
		return ansi.Truncate(fmt.Sprintf("needs %d×%d; q quits", leastWidth, leastHeight), d.width, "")
	}
	n := d.nodes[d.current]
	rows := []string{d.tabs()}
	if n.answered.IsZero() {
		rows = append(rows, d.unreachable(n)...)
	} else {
		rows = append(rows, d.identity(n), load(n.seen.status), controlPlane(n.seen))
		rows = append(rows, d.services(n)...)
		rows = append(rows, d.below(n)...)
	}
	for len(rows) < d.height-1 {
		rows = append(rows, "")
	}
	rows = append(rows[:d.height-1], faint.Render(keysHelp))
	for i := range rows {
		rows[i] = ansi.Truncate(rows[i], d.width, "…")
	}
	return strings.Join(rows, "\n")
}

// plain removes control characters and characters that change the direction of writing.
func plain(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.Is(unicode.Cf, r) {
			return -1
		}
		return r
	}, oneLine(text))
}

// tabs lists the nodes. If there isn't room for all, the current one is visible.
func (d *dashboard) tabs() string {
	var tabs []string
	for i, n := range d.nodes {
		mark, style := n.mark()
		text := fmt.Sprintf(" %d %s ", i+1, plain(n.name))
		if i == d.current {
			tabs = append(tabs, reversed.Render(text+mark+" "))
		} else {
			tabs = append(tabs, text+style.Render(mark)+" ")
		}
	}
	first, room := d.current, d.width-2
	for room -= ansi.StringWidth(tabs[first]); first > 0 && room >= ansi.StringWidth(tabs[first-1]); first-- {
		room -= ansi.StringWidth(tabs[first-1])
	}
	row := strings.Join(tabs[first:], "")
	if first > 0 {
		return "… " + row
	}
	return row
}

// mark is a node in one word.
func (n *nodeView) mark() (string, lipgloss.Style) {
	switch {
	case n.seen.at.IsZero():
		return "…", faint
	case n.unanswered():
		return "silent", bad
	}
	for _, s := range n.seen.services.GetServices() {
		if !s.Up && s.State != "Skipped" && s.State != "Finished" {
			return "waits", wait
		}
	}
	return "up", good
}

// unreachable is the screen of a node that has never answered.
func (d *dashboard) unreachable(n *nodeView) []string {
	if n.seen.err == nil {
		return []string{"", "asking " + plain(n.name) + " …"}
	}
	rows := []string{"", bad.Render("no answer; retrying every " + refresh.String()), ""}
	for line := range strings.Lines(n.seen.err.Error()) {
		rows = append(rows, strings.Split(ansi.Wrap(plain(line), d.width-1, ""), "\n")...)
	}
	return rows
}

func (d *dashboard) identity(n *nodeView) string {
	s := n.seen.status
	var parts []string
	if s != nil {
		parts = []string{strong.Render(plain(s.Hostname)), plain(s.MachineType), plain(s.Cluster), plain(s.Version), "up " + span(s.Uptime.AsDuration())}
		if s.Stage == "maintenance" {
			parts = append(parts, wait.Render("in maintenance mode"))
		}
		if s.Stage == "locked" {
			parts = append(parts, wait.Render("waits for its recovery key"))
		}
		parts = slices.DeleteFunc(parts, func(p string) bool { return p == "" })
	} else {
		parts = []string{strong.Render(plain(n.name))}
	}
	switch {
	case n.unanswered():
		parts = []string{parts[0], bad.Render("silent for " + span(n.seen.at.Sub(n.answered)) + ": " + plain(n.seen.err.Error()))}
	case n.seen.err != nil:
		parts = append(parts, wait.Render(plain(n.seen.err.Error())))
	}
	return strings.Join(parts, " · ")
}

func load(s *apiv1.NodeStatusResponse) string {
	if s == nil {
		return faint.Render("load is unknown")
	}
	text := fmt.Sprintf("load %.2f/%d CPUs", s.Load1, s.Cpus)
	if s.Load1 > float64(s.Cpus) {
		text = wait.Render(text)
	}
	for _, part := range []struct {
		name             string
		total, available uint64
	}{{"memory", s.MemoryTotal, s.MemoryAvailable}, {"/var", s.EphemeralTotal, s.EphemeralAvailable}} {
		if part.total > 0 {
			text += "  " + part.name + " " + bar(part.total-min(part.available, part.total), part.total)
		}
	}
	return text
}

const (
	barWidth  = 6
	barNearly = 90 // percent, from which the bar is red
)

func bar(used, total uint64) string {
	percent := int(100 * (float64(used) / float64(total)))
	full := (percent*barWidth + 50) / 100
	style := good
	if percent >= barNearly {
		style = bad
	}
	return style.Render(strings.Repeat("█", full)) + faint.Render(strings.Repeat("░", barWidth-full)) + fmt.Sprintf(" %d%% of %s", percent, size(total))
}

// controlPlane shows the Kubernetes control plane on the node.
func controlPlane(s snapshot) string {
	var parts []string
	if items := s.pods.GetItems(); len(items) > 0 {
		ready := 0
		var late []string
		for _, item := range items {
			if column(s.pods, item, "READY") == "True" {
				ready++
			} else {
				late = append(late, plain(strings.TrimPrefix(item.Id, "kube-system/")))
			}
		}
		text := fmt.Sprintf("%d of %d static pods ready", ready, len(items))
		if len(late) > 0 {
			text = wait.Render(text + ", not " + strings.Join(late, ", "))
		}
		parts = append(parts, text)
	}
	for _, item := range s.etcd.GetItems() {
		var etcd struct{ Ready bool }
		if err := yaml.Unmarshal([]byte(item.Spec), &etcd); err == nil && etcd.Ready {
			parts = append(parts, good.Render("etcd ready"))
		} else {
			parts = append(parts, wait.Render("etcd isn't ready"))
		}
	}
	if len(parts) == 0 {
		return faint.Render("no control plane")
	}
	return "control plane: " + strings.Join(parts, " · ")
}

func column(list *apiv1.ListResourcesResponse, item *apiv1.Resource, name string) string {
	i := slices.Index(list.GetDefinition().GetColumns(), name)
	if i < 0 || i >= len(item.Columns) {
		return ""
	}
	return item.Columns[i]
}

// services shows as many services as fit, around the selected one.
func (d *dashboard) services(n *nodeView) []string {
	all := n.seen.services.GetServices()
	wide := ansi.StringWidth("SERVICE")
	for _, s := range all {
		wide = max(wide, min(ansi.StringWidth(plain(s.Id)), leastWidth/2))
	}
	rows := []string{strong.Render(cell("SERVICE", wide) + cell("STATE", stateWidth) + cell("HEALTH", healthWidth) + cell("FOR", sinceWidth) + "MESSAGE")}
	room := d.layout().services
	at := max(0, slices.Index(n.ids(), n.selected))
	first := max(0, min(at-room/2, len(all)-room))
	for i := first; i < first+room; i++ {
		if i >= len(all) {
			rows = append(rows, "")
			continue
		}
		rows = append(rows, serviceRow(all[i], span(n.seen.services.SinceBoot.AsDuration()-all[i].Since.AsDuration()), wide, i == at))
	}
	return rows
}

const (
	stateWidth  = len("Preparing")
	healthWidth = len("HEALTH")
	sinceWidth  = len("100h59m59s")
)

func serviceRow(s *apiv1.Service, since string, wide int, selected bool) string {
	id, health := cell(plain(s.Id), wide), cell(plain(s.Health), healthWidth)
	switch {
	case selected:
		id = reversed.Render(id)
	case !s.Up && s.State != "Skipped":
		id = wait.Render(id)
	}
	switch s.Health {
	case "OK":
		health = good.Render(health)
	case "Fail":
		health = bad.Render(health)
	}
	text := plain(s.Message)
	if s.WaitingFor != "" {
		text = wait.Render("waits for " + plain(s.WaitingFor))
	}
	if s.Restarts > 0 {
		text += fmt.Sprintf(" (restarted %d×)", s.Restarts)
	}
	return id + cell(plain(s.State), stateWidth) + health + cell(since, sinceWidth) + text
}

// cell pads or truncates a text to the width of its column, plus a gap.
func cell(text string, width int) string {
	text = ansi.Truncate(text, width, "…")
	return text + strings.Repeat(" ", width-ansi.StringWidth(text)+2)
}

// tail returns the lower list: the log, or the events.
func (d *dashboard) tail() []string {
	if !d.showEvents {
		return d.lines
	}
	return ofEach(d.nodes[d.current].events, func(e *apiv1.ServiceEvent) string {
		return fmt.Sprintf("%s %s [%s]: %s", e.Time.AsTime().UTC().Format("15:04:05"), e.Service, e.State, e.Message)
	})
}

// below shows the log of the selected service and what that service waits for, or the
// events.
func (d *dashboard) below(n *nodeView) []string {
	all := d.tail()
	// The lines at the scroll position may have been dropped.
	end := max(min(d.room(), len(all)), len(all)-d.scroll)
	head := "LOG of " + plain(n.selected)
	if d.showEvents {
		head = "EVENTS"
	}
	switch {
	case d.scroll > 0:
		head += fmt.Sprintf(" (%d more lines below; End follows)", d.scroll)
	case d.logErr != nil && !d.showEvents:
		head += " (" + plain(d.logErr.Error()) + ")"
	}
	rows := append([]string{strong.Render(head)}, d.waits(n)...)
	for _, line := range all[max(0, end-d.room()):end] {
		rows = append(rows, plain(line))
	}
	return rows
}

// room is the number of visible lines of the log or events.
func (d *dashboard) room() int { return d.layout().below - len(d.waits(d.nodes[d.current])) }

// waitRows limits the rows for what a service waits for.
const waitRows = 3

// waits shows in full what the selected service waits for: the list above may truncate
// it.
func (d *dashboard) waits(n *nodeView) []string {
	i := slices.Index(n.ids(), n.selected)
	if d.showEvents || i < 0 || n.seen.services.Services[i].WaitingFor == "" {
		return nil
	}
	text := ansi.Wrap("waits for "+plain(n.seen.services.Services[i].WaitingFor), d.width, "")
	rows := strings.Split(text, "\n")
	rows = rows[:min(len(rows), waitRows, d.layout().below-1)]
	for i := range rows {
		rows[i] = wait.Render(rows[i])
	}
	return rows
}
