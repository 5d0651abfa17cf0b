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
		for _, id := range r.DependsOn {
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

// cycle returns the IDs of one dependency cycle, with its first ID again at the end, or nil. A service
// whose needs lead nowhere is in none; from any other one, needs lead into a circle.
func (g *Graph) cycle() []string {
	left := g.order
	leads := func(r *runner) bool { return slices.Contains(left, r) }
	for before := 0; before != len(left); {
		before = len(left)
		var next []*runner
		for _, r := range left {
			if slices.ContainsFunc(r.needs, leads) {
				next = append(next, r)
			}
		}
		left = next
	}
	if len(left) == 0 {
		return nil
	}
	var path []string
	for r := left[0]; ; r = r.needs[slices.IndexFunc(r.needs, leads)] {
		at := slices.Index(path, r.svc.ID)
		path = append(path, r.svc.ID)
		if at >= 0 {
			return path[at:]
		}
	}
}
