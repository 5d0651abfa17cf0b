package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/dag"
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

var serviceConditions = []condition{
	{
		id: "service-failing", severity: failure,
		sees:    "A service is Failed, and is tried again with growing pauses, or runs and isn't healthy.",
		why:     "It ends with an error each time, or doesn't answer.",
		next:    "Its last log lines show what is missing; gbctl logs SERVICE shows the rest.",
		follows: []string{"maintenance", "disks-not-ready", "disk-full", "network-no-address", "memory-low"},
		holds: func(s *snapshot) []finding {
			var out []finding
			for _, id := range slices.Sorted(maps.Keys(s.services)) {
				if !slices.Contains(own, id) && (id != machine.ID || s.stage != machine.Maintenance) {
					out = append(out, s.down(id, "Service "+id+" is not up.")...)
				}
			}
			return out
		},
	},
	{
		id: "service-restarting", severity: warning,
		sees:    "A service runs, and has ended several times within minutes.",
		why:     "It comes up each time and doesn't stay.",
		next:    "Its last log lines show why; gbctl logs SERVICE shows the rest.",
		follows: []string{"disk-full", "memory-low", "service-failing"},
		holds: func(s *snapshot) []finding {
			var out []finding
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
	},
	{
		id: "service-stopped", severity: warning,
		sees: "A service is Finished, message Stopped.",
		why:  "Somebody stopped it (gbctl service SERVICE stop); it stays so until it is started, or the machine.",
		next: "Start it: gbctl service SERVICE start.",
		holds: func(s *snapshot) []finding {
			var out []finding
			for _, id := range slices.Sorted(maps.Keys(s.services)) {
				if svc := s.services[id]; stopped(svc) {
					out = append(out, finding{what: "Service " + id + " was stopped.", next: "Start it: gbctl service " + id + " start.",
						since: s.at(svc.Since), evidence: []string{svc.asStatus()}})
				}
			}
			return out
		},
	},
	{
		id: "image-pulling", severity: info,
		sees: "A service stays in Preparing, its last event is Pulling image.",
		why:  "An image is fetched from its registry; over a slow network that takes a while.",
		next: "It passes when the image is there. A registry or mirror nearby (machine.registries.mirrors) makes it quick.",
		holds: func(s *snapshot) []finding {
			var out []finding
			for _, id := range slices.Sorted(maps.Keys(s.services)) {
				svc := s.services[id]
				if image, pulling := strings.CutPrefix(svc.Message, "Pulling image "); pulling && svc.State == dag.Preparing {
					out = append(out, finding{what: fmt.Sprintf("Image %s for service %s is being pulled.", image, id), since: s.at(svc.Since), evidence: []string{svc.asStatus()}})
				}
			}
			return out
		},
	},
	{
		id: "image-pull-failing", severity: failure,
		sees:    "Pull image … in the events of a service, ErrImagePull or ImagePullBackOff of a pod.",
		why:     "The registry, or the mirror that is configured for it, doesn't give the image.",
		next:    "Correct the image's name, or machine.registries.",
		follows: []string{"disk-full", "network-no-address", "no-nameserver", "network-no-route", "clock-wrong"},
		holds:   imagePullFailing,
	},
}

// stopped by an operator, or at the end.
func stopped(svc service) bool { return svc.State == dag.Finished && !svc.Up }

// down is that a service isn't up, unless it only just started to become so.
func (s *snapshot) down(id, what string) []finding {
	svc, ok := s.services[id]
	if !ok || svc.Up || svc.State == dag.Skipped || stopped(svc) {
		return nil
	}
	f := finding{what: what, since: s.at(svc.Since), evidence: []string{svc.asStatus()}}
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
		f.next = "It starts when that is so."
		f.passing = s.age(svc) < startTime
	default:
		f.passing = s.age(svc) < startTime
	}
	if len(ends) > 0 || !f.passing {
		f.evidence = append(f.evidence, asLog(id, lastError(s.tail(id, tailLines))))
	}
	return one(f)
}

// pullError is an image that can't be pulled: whose, and the words.
type pullError struct {
	of, words, evidence string
	since               time.Time
}

func imagePullFailing(s *snapshot) []finding {
	var out []finding
	for _, t := range append(s.servicePulls(), s.podPulls()...) {
		why, next := whyPull(t.words)
		out = append(out, finding{what: "The image for " + t.of + " can't be pulled.", why: why, next: next, since: t.since, evidence: []string{t.evidence}})
	}
	return out
}

func (s *snapshot) servicePulls() []pullError {
	var out []pullError
	for _, id := range slices.Sorted(maps.Keys(s.services)) {
		svc := s.services[id]
		ends := s.failures(svc, flapping)
		if svc.Up || len(ends) == 0 {
			continue
		}
		if last := ends[len(ends)-1]; strings.Contains(last.Message, "pull image ") {
			out = append(out, pullError{"service " + id, last.Message, asEvent(last), s.at(ends[0].SinceBoot)})
		}
	}
	return out
}

// podPulls are those of the pods of kube-system on this node, as Kubernetes or the
// kubelet tells them, or else its log: it doesn't answer while no API server does.
func (s *snapshot) podPulls() []pullError {
	var out []pullError
	seen := map[string]bool{}
	add := func(name, words, evidence string) {
		if !seen[name] {
			seen[name] = true
			out = append(out, pullError{of: "pod " + name, words: words, evidence: evidence})
		}
	}
	for _, pod := range s.allPods() {
		for _, c := range containers(pod.object) {
			reason, message := c.Text("state", "waiting", "reason"), c.Text("state", "waiting", "message")
			if reason == "ErrImagePull" || reason == "ImagePullBackOff" || reason == "InvalidImageName" || reason == "ErrImageNeverPull" {
				add(pod.name, message, fmt.Sprintf("pod %s: %s: %s", pod.name, reason, message))
			}
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

// pullReasons tell apart why an image can't be had, by the words of containerd's
// resolver and of registries.
var pullReasons = []struct {
	words     []string
	why, next string
}{
	{[]string{"no space left on device", "the disk is full"}, "There is no room for it.", "See disk-full."},
	{[]string{"401 Unauthorized", "403 Forbidden", "authorization failed", "authentication required", "pull access denied", "insufficient_scope"},
		"The registry requires authentication, and doesn't accept what it got.", "Give it a user in machine.registries.config, or correct the one that is there."},
	{[]string{"x509:", "certificate"}, "The registry's certificate isn't accepted.", "Name its authority in machine.registries.config.HOST.tls.ca; and see that the node's clock is right."},
	{[]string{"no such host", "server misbehaving"}, "The registry's name can't be resolved.", "Correct machine.network.nameservers or the name, or configure a mirror in machine.registries.mirrors."},
	{[]string{"connection refused", "i/o timeout", "no route to host", "network is unreachable", "context deadline exceeded", "EOF", "connection reset"},
		"The registry, or the mirror that is configured for it, doesn't answer.", "Make it reachable, or correct machine.registries.mirrors."},
	{[]string{"server gave HTTP response to HTTPS client"}, "The registry speaks plain HTTP.", "Write its mirror's endpoint with http:// in machine.registries.mirrors."},
	{[]string{"not found", "manifest unknown", "404"}, "The registry has no image of that name.", "Correct the image's name and tag in the configuration, or bring it to the mirror."},
	{[]string{"invalid reference", "InvalidImageName", "couldn't parse image"}, "That is no name of an image.", "Correct it in the configuration."},
	{[]string{"toomanyrequests", "429"}, "The registry limits how often it may be asked.", "Wait, give it a user in machine.registries.config, or use a mirror."},
}

func whyPull(words string) (why, next string) {
	for _, r := range pullReasons {
		for _, w := range r.words {
			if strings.Contains(words, w) {
				return r.why, r.next
			}
		}
	}
	return "", ""
}
