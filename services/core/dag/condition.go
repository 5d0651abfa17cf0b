package dag

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
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
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (c upCondition) holds() bool {
	c.r.g.mu.Lock()
	defer c.r.g.mu.Unlock()
	return c.r.up()
}

// All is the condition that all of conds hold. During a Wait, its String lists
// those that haven't held yet, sorted, and so becomes shorter.
func All(conds ...Condition) Condition {
	parts := flatten(conds)
	return &all{parts: parts, met: make([]bool, len(parts))}
}

type all struct {
	parts []Condition

	mu  sync.Mutex
	met []bool // guarded by mu; by index of parts
}

func (a *all) Wait(ctx context.Context) error {
	a.mu.Lock()
	clear(a.met)
	a.mu.Unlock()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for i, part := range a.parts {
		wg.Go(func() {
			if err := part.Wait(ctx); err != nil {
				cancel(fmt.Errorf("wait for %s: %w", part, err))
				return
			}
			a.mu.Lock()
			a.met[i] = true
			a.mu.Unlock()
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

func (a *all) String() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return describe(unmet(a.parts, a.met))
}

// flatten replaces every All by its parts, so that each part is reported
// separately.
func flatten(conds []Condition) []Condition {
	var parts []Condition
	for _, c := range conds {
		if a, ok := c.(*all); ok {
			parts = append(parts, a.parts...)
			continue
		}
		parts = append(parts, c)
	}
	return parts
}

// describe joins the texts of conditions, sorted.
func describe(conds []Condition) string {
	texts := make([]string, 0, len(conds))
	for _, c := range conds {
		texts = append(texts, c.String())
	}
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

func (f formerRun) Wait(ctx context.Context) error {
	select {
	case <-f.ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
