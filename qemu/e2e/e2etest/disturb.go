//go:build e2e

package e2etest

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/qemu"
)

const (
	// bootBudget is for a node to boot, and to continue its operations.
	bootBudget = 3 * time.Minute
	// stepBudget is for anything to happen in an operation that isn't disturbed.
	stepBudget = 12 * time.Minute
)

var (
	// stepBegins is a line about a step that begins, or a part of it.
	stepBegins = regexp.MustCompile(`(?m)^\S+:   … ([a-z0-9-]+)(?: \S+)?: `)
	// operationBegins is the first line about an operation.
	operationBegins = regexp.MustCompile(`(?m)^\S+: ([a-z0-9-]+-[a-z2-7]{8}) running: `)
)

// A Disturbance interrupts an operation at each of its steps.
type Disturbance struct {
	Node    qemu.Node // that runs it
	Command []string  // of gbctl, without -n
	// Once are further disturbances, by the output after which they come. There must be this output.
	Once map[string]func()
}

// disturbed is an operation under way.
type disturbed struct {
	Disturbance
	c         *Cluster
	id        string
	cut, left map[string]bool // the steps at which the node lost power, and the client was killed
}

// Disturb runs the command, and returns when the operation has ended well. At each step that it
// sees, the node loses power while the client follows. When the step runs again, the client is
// killed, and the command runs again. All questions are answered with yes. It returns the
// steps; a step of a few milliseconds may be over before it is seen.
func (c *Cluster) Disturb(how Disturbance) (steps []string) {
	c.t.Helper()
	d := &disturbed{Disturbance: how, c: c, cut: map[string]bool{}, left: map[string]bool{}}
	s := c.Session(d.command()...)
	if !s.Await(stepBudget, "an operation", func(string) bool { return s.Operation() != "" }) {
		c.t.Fatalf("it hasn't begun: %v\n%s", s.err, s.Text())
	}
	d.id = s.Operation()
	for s != nil {
		if s = d.next(s); s != nil && s.Ended() {
			break
		}
	}
	if s != nil && s.err != nil {
		c.t.Fatalf("%s: %v\n%s", d.id, s.err, s.Text())
	}
	for part := range d.Once {
		c.t.Errorf("the output of %s never had %q", d.id, part)
	}
	c.Eventually(bootBudget, "it is done", func() error {
		out, err := d.list()
		if err == nil && !Row(out, d.id, "done") {
			err = fmt.Errorf("there is\n%s", out)
		}
		return err
	})
	return slices.Sorted(maps.Keys(d.cut))
}

func (d *disturbed) command() []string {
	return append([]string{"-n", d.Node.Address.String()}, d.Command...)
}

func (d *disturbed) list() (string, error) {
	return d.c.TryGbctl("-n", d.Node.Address.String(), "operation", "list")
}

// current is the step that began last.
func current(text string) string {
	all := stepBegins.FindAllStringSubmatch(text, -1)
	if len(all) == 0 {
		return ""
	}
	return all[len(all)-1][1]
}

// once is the next of the further disturbances; "" if there is none now.
func (d *disturbed) once(text string) string {
	for part := range d.Once {
		if strings.Contains(text, part) {
			return part
		}
	}
	return ""
}

// next waits for a step, or something else to do, and does it. It returns the session that
// goes on, or nil if the operation has ended.
func (d *disturbed) next(s *Session) *Session {
	d.c.t.Helper()
	if !s.Await(stepBudget, "the next step", func(text string) bool {
		step := current(text)
		return step != "" && (!d.cut[step] || !d.left[step]) || prompted(text) != "" || d.once(text) != ""
	}) {
		return s
	}
	text := s.Text()
	step, part := current(text), d.once(text)
	switch {
	case part != "":
		d.c.t.Logf("at %s: further disturbance after %q", step, part)
		d.Once[part]()
		delete(d.Once, part)
	case step != "" && !d.cut[step]:
		d.cut[step] = true
		return d.cutPower(s, step)
	case step != "" && !d.left[step]:
		d.left[step] = true
		s.Kill()
		d.c.t.Logf("at %s: the client is killed", step)
		return d.again()
	default:
		s.Type("yes")
	}
	return s
}

// cutPower: the client shows that the operation goes on, or its end.
func (d *disturbed) cutPower(s *Session, step string) *Session {
	t := d.c.t
	t.Helper()
	start := time.Now()
	if err := d.c.Cut(t.Context(), d.Node.Name); err != nil {
		t.Fatal(err)
	}
	before := len(s.Text())
	if err := d.c.On(t.Context(), d.Node.Name); err != nil {
		t.Fatal(err)
	}
	s.Await(bootBudget, "the operation after a power cut at "+step, func(text string) bool {
		return strings.Contains(text[before:], "is its coordinator")
	})
	t.Logf("at %s: the power was cut; the operation went on after %.1fs", step, time.Since(start).Seconds())
	return s
}

// again runs the command until it follows the operation. It returns nil if that has ended.
func (d *disturbed) again() (s *Session) {
	d.c.t.Helper()
	d.c.Eventually(bootBudget, "the same command follows the operation", func() error {
		out, err := d.list()
		if err == nil && !Row(out, d.id, "running") {
			return nil
		} else if err != nil {
			return err
		}
		s = d.c.Session(d.command()...)
		if s.Await(bootBudget, "that it runs", func(text string) bool { return strings.Contains(text, d.id+" already runs") }) {
			return nil
		}
		err = fmt.Errorf("%w: %s", s.err, s.Text())
		s = nil
		return err
	})
	return s
}
