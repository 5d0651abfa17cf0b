package services

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/front/apid"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disks"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/garboard-os/garboard/services/system/udev"
)

const (
	// waitReport is how often the console says what the machine still waits for: a
	// person who looks at it gets an answer before they get impatient. Each time after
	// which nothing has changed, the pause is twice as long, until it is maxWaitReport.
	waitReport    = 10 * time.Second
	maxWaitReport = 5 * time.Minute

	chartFile = "boot-chart.svg" // in boot.LogDir
)

// reporter tells the console the story of the services: every transition, what
// the machine waits for and since when, and, once all are up, the boot chart.
type reporter struct {
	mode    boot.Mode
	graph   *dag.Graph
	store   *resource.Store
	logs    *logs.Logs
	chartTo string // device that also gets the chart as SVG, "" for none

	since     func() time.Duration // since boot
	waited    string               // what waits says, since
	next      time.Duration        // when it says it again
	pause     time.Duration        // after that
	charted   bool
	persisted bool
}

// run tells until ctx ends. The subscription is the caller's, from before the
// graph runs: what is wrong with a node may be said in its first milliseconds.
func (r *reporter) run(ctx context.Context, events <-chan dag.Event) {
	pods := r.store.Watch(ctx, controlplane.StaticPodStatuses.Type())
	ready := map[string]bool{}
	tick := time.NewTicker(waitReport)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case e, ok := <-events:
			if !ok {
				return // ctx has ended
			}
			r.event(e)
		case <-pods:
			r.pods(ready)
		case <-tick.C:
			r.waits()
		}
	}
}

// waiting is what the machine waits for. Without a configuration, that is the
// configuration, which machined and apid have said: only what keeps a person from sending
// one is worth more lines.
func (r *reporter) waiting(now time.Duration) []string {
	statuses := r.graph.Statuses()
	if stage, err := configuration.Stages.Get(r.store, configuration.StageID); err == nil && stage.Spec.Anonymous() {
		statuses = slices.DeleteFunc(statuses, func(s dag.Status) bool { return !slices.Contains([]string{udev.ID, network.ID, apid.ID}, s.ID) })
	}
	return waitingFor(statuses, now)
}

// waits says what the machine waits for.
func (r *reporter) waits() {
	same := strings.Join(r.waiting(0), "; ") // without the time that passes
	if same != r.waited {
		r.waited, r.pause, r.next = same, waitReport, 0
	}
	if now := r.since(); same != "" && now >= r.next {
		r.logs.Printf("not up yet: %s", strings.Join(r.waiting(now), "; "))
		r.next = now + r.pause
		r.pause = sleep.Longer(r.pause, waitReport, maxWaitReport)
	}
}

func (r *reporter) event(e dag.Event) {
	up := ""
	if e.Up {
		up = " (up)"
	}
	r.logs.Printf("%s: %s%s: %s", e.Service, e.State, up, besides(e.State, e.Message))
	if e.Service == disks.ID && e.Up && !r.persisted {
		r.persisted = true
		if err := r.logs.Persist(boot.LogDir, configuration.BootNumber(r.store)); err != nil {
			r.logs.Printf("logs stay in memory only: %v", err)
		} else {
			r.crash()
		}
	}
	if e.Up && !r.charted && len(waitingFor(own(r.graph.Statuses()), 0)) == 0 {
		r.charted = true
		r.chart()
	}
}

// crash moves what the kernel of an earlier boot stored to the log of it. In a container
// nothing is mounted there.
func (r *reporter) crash() {
	lines, why, forget := logs.Crash(boot.PstoreDir)
	if len(lines) == 0 {
		return
	}
	w := r.logs.Writer(logs.CrashID)
	fmt.Fprintln(w, strings.Join(lines, "\n"))
	r.logs.Printf("the kernel died in an earlier boot: %s; gbctl logs %s", cmp.Or(why, "it stored no reason"), logs.CrashID)
	if err := forget(); err != nil {
		r.logs.Printf("remove what the kernel stored: %v", err)
	}
}

// pods says once per change whether the control plane's pods serve: they aren't
// services of the graph, and are what most people wait for.
func (r *reporter) pods(ready map[string]bool) {
	for _, pod := range controlplane.StaticPodStatuses.List(r.store) {
		if now := pod.Spec.Ready(); now != ready[pod.ID] {
			ready[pod.ID] = now
			word := map[bool]string{true: "ready", false: "not ready"}[now]
			r.logs.Printf("static pod %s: %s", pod.ID, word)
		}
	}
}

// chart shows how the boot went: as text on the console, as a picture beside the
// logs.
func (r *reporter) chart() {
	if err := r.draw(dag.NewChart(r.graph.BootEvents())); err != nil {
		r.logs.Printf("boot chart: %v", err)
	}
}

func (r *reporter) draw(chart dag.Chart) error {
	var text, svg bytes.Buffer
	if err := errors.Join(chart.Text(&text), chart.SVG(&svg)); err != nil {
		return err
	}
	r.logs.Printf("boot chart:")
	for line := range strings.Lines(text.String()) {
		r.logs.Printf("%s", strings.TrimRight(line, "\n"))
	}
	err := untrusted.WriteFile(filepath.Join(boot.LogDir, chartFile), svg.Bytes(), 0o644)
	if r.chartTo != "" {
		err = errors.Join(err, writeDevice(r.chartTo, svg.Bytes()))
	}
	return err
}

func writeDevice(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.Write(data)
	return err
}

// besides is what a message says besides the state, which some begin with for
// those who see only them.
func besides(state dag.State, message string) string {
	return strings.TrimPrefix(message, string(state)+": ")
}

// waitingFor names the services that aren't up, what they do about it, and since
// when. Those that only wait for other services are named at the end: what ends
// their wait is said of the others.
func waitingFor(statuses []dag.Status, now time.Duration) (parts []string) {
	var behind []string
	for _, s := range statuses {
		switch {
		case s.Up, s.State == dag.Stopping, s.State == dag.Finished:
			// who was told to stop, as before a reboot, isn't awaited
		case s.Reason == dag.Behind:
			behind = append(behind, s.ID)
		default:
			parts = append(parts, fmt.Sprintf("%s %s for %s: %s", s.ID, s.State, max(now-s.Since, 0).Round(time.Second), besides(s.State, s.Message)))
		}
	}
	if len(behind) > 0 && len(parts) > 0 {
		parts = append(parts, "behind them: "+strings.Join(behind, ", "))
	}
	return parts
}
