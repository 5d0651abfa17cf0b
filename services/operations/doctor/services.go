package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/system/machine"
)

const (
	// flapping is how far back ends of a service count.
	flapping = 10 * time.Minute
	// flaps within it are more than accidents.
	flaps = 3
)

// own are services with conditions of their own: vip only waits for etcd.
var own = []string{"networkd", "disks", "etcd", "kubelet", "apid", "vip"}

var serviceConditions = checks{
	"service-failing": func(s *snapshot) (out []finding) {
		for _, id := range slices.Sorted(maps.Keys(s.services)) {
			if !slices.Contains(own, id) && (id != machine.ID || s.stage != machine.Maintenance) {
				out = append(out, s.down(id, "Service "+id+" is not up.")...)
			}
		}
		return out
	},
	"service-restarting": func(s *snapshot) (out []finding) {
		for _, id := range slices.Sorted(maps.Keys(s.services)) {
			svc := s.services[id]
			ends := s.failures(svc, flapping)
			if !svc.Up || len(ends) < flaps {
				continue
			}
			f := finding{what: fmt.Sprintf("Service %s is up, and ended %d times in the last %s.", id, len(ends), flapping), since: s.at(ends[0].SinceBoot)}
			f.evidence = []string{asEvent(ends[len(ends)-1]), asLog(id, lastError(s.tail(id, tailLines)))}
			out = append(out, f)
		}
		return out
	},
	"service-stopped": func(s *snapshot) (out []finding) {
		for _, id := range slices.Sorted(maps.Keys(s.services)) {
			if svc := s.services[id]; stopped(svc) {
				out = append(out, finding{what: "Service " + id + " was stopped.", next: "Start it: gbctl service " + id + " start.",
					since: s.at(svc.Since), evidence: []string{svc.asStatus()}})
			}
		}
		return out
	},
	"image-pulling": func(s *snapshot) (out []finding) {
		for _, id := range slices.Sorted(maps.Keys(s.services)) {
			svc := s.services[id]
			if svc.Reason == containerd.Pulling {
				out = append(out, finding{what: fmt.Sprintf("Service %s waits for its image: %s.", id, svc.Message), since: s.at(svc.Since), evidence: []string{svc.asStatus()}})
			}
		}
		return out
	},
	"image-pull-failing": func(s *snapshot) []finding { return append(s.servicePulls(), s.podPulls()...) },
}

// stopped by an operator, or at the end.
func stopped(svc service) bool { return svc.State == dag.Finished && !svc.Up }

// down is that a service isn't up, unless it only just started to become so.
func (s *snapshot) down(id, what string) []finding {
	svc, ok := s.services[id]
	if !ok || svc.Up || svc.State == dag.Skipped || stopped(svc) {
		return nil
	}
	f := finding{what: what, code: svc.Reason, since: s.at(svc.Since), evidence: []string{svc.asStatus()}}
	ends := s.failures(svc, flapping)
	switch {
	case svc.State == dag.Failed:
		if len(ends) > 0 {
			f.since = s.at(ends[0].SinceBoot)
		}
	case len(ends) > 0:
		// Between two tries it looks as if it came up.
		f.since = s.at(ends[0].SinceBoot)
		f.evidence = append([]string{asEvent(ends[len(ends)-1])}, f.evidence...)
	case svc.State == dag.Waiting:
		f.why = "It waits for " + svc.Waiting + "."
		f.next = "It starts after that."
		f.passing = s.age(svc) < startTime
	default:
		f.passing = s.age(svc) < startTime
	}
	if len(ends) > 0 || !f.passing {
		f.evidence = append(f.evidence, asLog(id, lastError(s.tail(id, tailLines))))
	}
	return one(f)
}

func (s *snapshot) servicePulls() (out []finding) {
	for _, id := range slices.Sorted(maps.Keys(s.services)) {
		svc := s.services[id]
		ends := s.failures(svc, flapping)
		if svc.Lacks != "" && svc.Lacks != containerd.Pulling {
			out = append(out, goesOn("service "+id, svc.Waiting, svc.Lacks))
		}
		if svc.Up || len(ends) == 0 {
			continue
		}
		if last := ends[len(ends)-1]; containerd.IsPullReason(last.Reason) {
			out = append(out, finding{what: pullFails("service " + id), code: last.Reason, evidence: []string{asEvent(last)}, since: s.at(ends[0].SinceBoot)})
		}
	}
	return out
}

// goesOn is that a program runs with its former image, because a new one can't be pulled.
func goesOn(of, text string, code reason.Code) finding {
	return finding{what: pullFails(of) + " The former one goes on.", code: code, evidence: []string{of + " " + text}}
}

func pullFails(of string) string { return "The image for " + of + " can't be pulled." }

// podPulls are those of the pods of kube-system on this node, as Kubernetes or the
// kubelet tells them, or else its log: it doesn't answer while no API server does.
func (s *snapshot) podPulls() (out []finding) {
	seen := map[string]bool{}
	add := func(name, words, evidence string) {
		if !seen[name] {
			seen[name] = true
			out = append(out, finding{what: pullFails("pod " + name), code: containerd.PullReason(words), evidence: []string{evidence}})
		}
	}
	look := func(name string, pod kubeclient.Object) {
		for _, c := range containers(pod) {
			reason, message := c.Text("state", "waiting", "reason"), c.Text("state", "waiting", "message")
			if reason == "ErrImagePull" || reason == "ImagePullBackOff" || reason == "InvalidImageName" || reason == "ErrImageNeverPull" {
				add(name, message, fmt.Sprintf("pod %s: %s: %s", name, reason, message))
			}
		}
	}
	known := map[string]bool{}
	if s.cluster != nil {
		for _, p := range s.cluster.pods {
			look(kubeSystem+"/"+p.Name(), p)
			known[strings.TrimSuffix(p.Name(), "-"+s.hostname)] = true
		}
	}
	for _, program := range controlPlanePrograms { // static ones that only the kubelet knows
		code := reason.Code(s.pods[program].Text("status", controlplane.Lacks, "reason"))
		if text := s.pods[program].Text("status", controlplane.Lacks, "message"); text != "" && code != containerd.Pulling {
			out = append(out, goesOn("static pod "+program, text, code))
		}
		if p, ok := s.pods[program]; ok && !known[program] {
			look(kubeSystem+"/"+program, p)
		}
	}
	if s.cluster != nil && len(s.cluster.pods) > 0 {
		return out
	}
	// What the kubelet told last may be older than what is wrong.
	log := s.tail("kubelet", 0)
	for _, program := range controlPlanePrograms {
		if words, line := syncError(log, program, s.now); strings.Contains(words, "ImagePull") || strings.Contains(words, "InvalidImageName") {
			add(program, words, asLog("kubelet", line))
		}
	}
	return out
}
