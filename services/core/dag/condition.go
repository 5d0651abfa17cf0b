package dag

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/sleep"
)

// Up is the condition that service id is up. It must be one of the graph's.
func (g *Graph) Up(id string) Condition {
	r := g.runners[id]
	if r == nil {
		panic(fmt.Sprintf("condition on service %q: no such service", id))
	}
	return upCondition{r}
}

type upCondition struct{ r *runner }

func (c upCondition) String() string {
	return fmt.Sprintf("service %q to be %q", c.r.svc.ID, "up")
}

func (c upCondition) Wait(ctx context.Context) error {
	for {
		c.r.g.mu.Lock()
		up, changed := c.r.up(), c.r.upChanged
		c.r.g.mu.Unlock()
		if up {
			return nil
		}
		if err := sleep.Await(ctx, changed); err != nil {
			return err
		}
	}
}

func (c upCondition) holds() bool {
	c.r.g.mu.Lock()
	defer c.r.g.mu.Unlock()
	return c.r.up()
}

// A file is looked for often at first, because a boot may wait for it, and later seldom: it may never come.
const (
	filePoll     = 50 * time.Millisecond
	filePollLate = time.Second
	fileLate     = 10 * time.Second
)

// File is the condition that a file exists.
type File string

func (f File) String() string { return fmt.Sprintf("file %q to exist", string(f)) }

// Wait implements Condition.
func (f File) Wait(ctx context.Context) error {
	for began, poll := time.Now(), filePoll; ; {
		if _, err := os.Stat(string(f)); err == nil {
			return nil
		}
		if time.Since(began) > fileLate {
			poll = filePollLate
		}
		if !sleep.For(ctx, poll) {
			return ctx.Err()
		}
	}
}

// describe joins the texts of conditions, sorted.
func describe(conds []Condition) string {
	texts := lists.Of(conds, Condition.String)
	slices.Sort(texts)
	return strings.Join(slices.Compact(texts), ", ")
}

// formerRun is the condition that an abandoned run has ended: a service never
// runs twice at the same time.
type formerRun struct {
	id    string
	ended <-chan struct{}
}

func (f formerRun) String() string {
	return fmt.Sprintf("the former run of service %q to end", f.id)
}

func (f formerRun) Wait(ctx context.Context) error { return sleep.Await(ctx, f.ended) }
