package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/system/configuration"
)

const (
	// flapping is how far back ends of a service count.
	flapping = 10 * time.Minute
	// flaps within it are more than accidents.
	flaps = 3
)

// serviceStopped explains whatever needs the service.
const serviceStopped = "service-stopped"

// own are services with conditions of their own: vip only waits for etcd.
var own = []string{"networkd", "disks", "etcd", "kubelet", "apid", "vip"}

var serviceConditions = checks{
	"service-failing": eachService(func(s *snapshot, id string, _ service) []finding {
		if slices.Contains(own, id) || id == configuration.ID && s.stage.Anonymous() {
			return nil
		}
		return s.down(id, "Service "+id+" is not up.")
	}),
	"service-restarting": eachService(func(s *snapshot, id string, svc service) []finding {
		ends := s.failures(svc, flapping)
		if !svc.Up || len(ends) < flaps {
			return nil
		}
		return one(finding{what: fmt.Sprintf("Service %s is up, and ended %d times in the last %s.", id, len(ends), flapping), since: s.at(ends[0].SinceBoot),
			evidence: []string{asEvent(ends[len(ends)-1]), asLog(id, lastError(s.tail(id, tailLines)))}})
	}),
	serviceStopped: eachService(func(s *snapshot, id string, svc service) []finding {
		f := finding{what: "Service " + id + " was stopped.", next: "Start it: gbctl -n ADDRESS service " + id + " start.", since: s.at(svc.Since), evidence: []string{svc.asStatus()}}
		switch {
		case !stopped(svc):
			return nil
		case slices.Contains([]string{"containerd", "etcd", "kubelet"}, id):
			f.severity, f.why = failure, "A user stopped it (gbctl service "+id+" stop), and Kubernetes can't go on without it on this node. It stays stopped until a user starts it, or until the next boot."
		}
		return one(f)
	}),
	"image-pulling": eachService(func(s *snapshot, id string, svc service) []finding {
		return when(svc.Reason == containerd.Pulling, finding{what: fmt.Sprintf("Service %s waits for its image: %s.", id, svc.Message), since: s.at(svc.Since), evidence: []string{svc.asStatus()}})
	}),
	"image-sick":         func(s *snapshot) []finding { return s.pulls(true) },
	"registry-silent":    registriesSilent,
	"image-pull-failing": func(s *snapshot) []finding { return s.pulls(false) },
}

// eachService asks about one service after another.
func eachService(about func(*snapshot, string, service) []finding) func(*snapshot) []finding {
	return func(s *snapshot) []finding {
		ids := slices.Sorted(maps.Keys(s.services))
		return slices.Concat(lists.Of(ids, func(id string) []finding { return about(s, id, s.services[id]) })...)
	}
}

// registriesSilent are those of which no server answers, and mirrors: each pull asks them first. That a registry can't
// be reached that nobody has made a mirror of is normal in a network of its own, as long as no pull fails.
func registriesSilent(s *snapshot) []finding {
	f, answered, silent := finding{severity: info}, map[string]bool{}, []string{}
	for _, r := range s.images {
		answered[r.Of] = answered[r.Of] || r.Err == nil
	}
	for _, r := range s.images {
		if r.Err == nil || answered[r.Of] && !r.Mirror {
			continue
		}
		if r.Mirror {
			f.severity = warning
		}
		f.code, silent = cmp.Or(f.code, containerd.PullReason(r.Err.Error())), append(silent, r.URL)
		f.evidence = append(f.evidence, fmt.Sprintf("images of %s: %v", r.Of, r.Err))
	}
	f.what = "Servers of images don't answer: " + strings.Join(slices.Compact(slices.Sorted(slices.Values(silent))), ", ") + "."
	return one(f)
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
		f.next = "It starts as soon as that is so. gbctl services shows how that is."
		f.needs = slices.DeleteFunc(slices.Clone(svc.DependsOn), func(id string) bool { return !strings.Contains(svc.Waiting, strconv.Quote(id)) })
		f.until = f.since.Add(startTime)
	default:
		f.until = f.since.Add(startTime)
	}
	if len(ends) > 0 || !f.until.After(s.now) {
		f.evidence = append(f.evidence, asLog(id, lastError(s.tail(id, tailLines))))
	}
	return one(f)
}

func (s *snapshot) pulls(sick bool) []finding {
	return slices.DeleteFunc(append(servicePulls(s), s.podPulls()...), func(f finding) bool { return sick != (f.code == containerd.ImageSick) })
}

var servicePulls = eachService(func(s *snapshot, id string, svc service) (out []finding) {
	ends := s.failures(svc, flapping)
	if svc.Lacks != "" && svc.Lacks != containerd.Pulling {
		out = append(out, goesOn("service "+id, svc.Waiting, svc.Lacks))
	}
	if svc.Up || len(ends) == 0 || !containerd.IsPullReason(ends[len(ends)-1].Reason) {
		return out
	}
	last := ends[len(ends)-1]
	return append(out, finding{what: pullFails("service " + id), code: last.Reason, evidence: []string{asEvent(last)}, since: s.at(ends[0].SinceBoot)})
})

// goesOn is that a program runs with its former image, because a new one can't be pulled, or doesn't work.
func goesOn(of, text string, code reason.Code) finding {
	f := finding{what: pullFails(of) + " The former one goes on.", code: code, evidence: []string{of + " " + text}}
	if code == containerd.ImageSick {
		f.what, f.why = "The new image for "+of+" doesn't work. The former one goes on.", of+" "+text+"."
	}
	return f
}

func pullFails(of string) string { return "The image for " + of + " can't be pulled." }

// podPulls are those of the pods on this node, as Kubernetes or the
// kubelet tells them, or else its log: it doesn't answer while no API server does.
func (s *snapshot) podPulls() (out []finding) {
	seen := map[string]bool{}
	add := func(name, words, evidence string) {
		if !seen[name] {
			seen[name] = true
			f := finding{what: pullFails("pod " + name), code: containerd.PullReason(words), evidence: []string{evidence}}
			if strings.Contains(name, "/") && !strings.HasPrefix(name, kubeSystem+"/") {
				f.severity = warning
			}
			out = append(out, f)
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
			look(p.Namespace()+"/"+p.Name(), p)
			known[p.Namespace()+"/"+strings.TrimSuffix(p.Name(), "-"+s.hostname)] = true
		}
	}
	for _, program := range controlplane.Programs { // static ones that only the kubelet knows
		code := reason.Code(s.pods[program].Text("status", controlplane.Lacks, "reason"))
		if text := s.pods[program].Text("status", controlplane.Lacks, "message"); text != "" && code != containerd.Pulling {
			out = append(out, goesOn("static pod "+program, text, code))
		}
		if p, ok := s.pods[program]; ok && !known[kubeSystem+"/"+program] {
			look(kubeSystem+"/"+program, p)
		}
	}
	if s.cluster != nil && len(s.cluster.pods) > 0 {
		return out
	}
	// What the kubelet told last may be older than what is wrong.
	log := s.tail("kubelet", 0)
	for _, program := range controlplane.Programs {
		if words, line := syncError(log, program, s.now); strings.Contains(words, "ImagePull") || strings.Contains(words, "InvalidImageName") {
			add(program, words, asLog("kubelet", line))
		}
	}
	return out
}
