package dag

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// connect links the runners by their needs. All problems are reported together.
func (g *Graph) connect(services []Service) error {
	var problems []error
	for _, svc := range services {
		switch {
		case svc.ID == "":
			problems = append(problems, errors.New("a service without an ID"))
		case svc.Run == nil:
			problems = append(problems, fmt.Errorf("service %q has no Run", svc.ID))
		case g.runners[svc.ID] != nil:
			problems = append(problems, fmt.Errorf("service %q is there twice", svc.ID))
		default:
			r := newRunner(g, svc)
			g.runners[svc.ID] = r
			g.order = append(g.order, r)
		}
	}
	for _, r := range g.order {
		for _, id := range r.dependsOn {
			need := g.runners[id]
			if need == nil {
				problems = append(problems, fmt.Errorf("service %q depends on %q, which doesn't exist", r.svc.ID, id))
				continue
			}
			r.needs = append(r.needs, need)
			need.dependants = append(need.dependants, r)
		}
	}
	if len(problems) > 0 {
		return errors.Join(problems...)
	}
	if cycle := g.cycle(); cycle != nil {
		return fmt.Errorf("services depend on each other in a circle: %s", strings.Join(cycle, " → "))
	}
	return nil
}

// cycle returns the IDs of one dependency cycle, with its first ID again at the end, or nil. It
// is a depth-first search: a service that is reached again while it is still open closes a cycle.
func (g *Graph) cycle() []string {
	const open, closed = 1, 2
	seen := make(map[*runner]int, len(g.order))
	var path []string
	var visit func(r *runner) []string
	visit = func(r *runner) []string {
		seen[r] = open
		path = append(path, r.svc.ID)
		for _, need := range r.needs {
			switch seen[need] {
			case open:
				from := slices.Index(path, need.svc.ID)
				return append(slices.Clone(path[from:]), need.svc.ID)
			case closed:
				continue
			}
			if cycle := visit(need); cycle != nil {
				return cycle
			}
		}
		path = path[:len(path)-1]
		seen[r] = closed
		return nil
	}
	for _, r := range g.order {
		if seen[r] == 0 {
			if cycle := visit(r); cycle != nil {
				return cycle
			}
		}
	}
	return nil
}
