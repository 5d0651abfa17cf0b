package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
)

// The control plane's programs: names of their pods, containers and files.
const (
	apiServer         = "kube-apiserver"
	controllerManager = "kube-controller-manager"
	scheduler         = "kube-scheduler"
)

var controlPlaneConditions = checks{
	"static-pods-not-generated": func(s *snapshot) []finding {
		missing := lists.Of(controlplane.Programs, func(program string) string { return staticPodPrefix + program + ".yaml" })
		missing = slices.DeleteFunc(missing, func(name string) bool { return slices.Contains(s.files.staticPodFiles, name) })
		evidence := []string{fmt.Sprintf("ls %s: [%s]", boot.StaticPodsDir, strings.Join(s.files.staticPodFiles, " ")), fmt.Sprintf("resources StaticPods: %d", s.staticPods)}
		return when(s.controlPlane() && s.files.seen && len(missing) > 0, finding{
			what: "Static pods are not written: " + strings.Join(missing, ", ") + ".", until: s.at(startTime),
			evidence: append(evidence, lists.Of(s.controllers, asFailure)...),
		})
	},
	"apiserver-not-running":          func(s *snapshot) []finding { return s.programDown(apiServer) },
	"controller-manager-not-running": func(s *snapshot) []finding { return s.programDown(controllerManager) },
	"scheduler-not-running":          func(s *snapshot) []finding { return s.programDown(scheduler) },
	"controller-failing": func(s *snapshot) []finding {
		return lists.Some(s.controllers, func(c resource.Object[resource.Failure]) (finding, bool) {
			told := c.Spec.Reason == secrets.Missing || c.ID == manifestApplier && slices.ContainsFunc(s.troubled, ofManifest) ||
				c.ID == apiSecrets && len(s.down("apid", "")) > 0 // by other conditions
			return finding{what: "Controller " + c.ID + " fails.", code: c.Spec.Reason, since: c.Spec.Since, until: s.at(bootstrapTime), evidence: []string{asFailure(c)}}, !told
		})
	},
}

// programDown is that one program of the control plane doesn't serve.
func (s *snapshot) programDown(program string) []finding {
	if !s.controlPlane() {
		return nil
	}
	var asked *answer
	if program == apiServer {
		asked = s.local
	} else if a, ok := s.programs[program]; ok {
		asked = &a
	}
	if asked == nil || asked.ok() {
		return nil
	}
	f := finding{what: program + " doesn't serve on this node.", until: s.started(program), evidence: []string{asked.text()}}
	if asked.err == nil && program == apiServer {
		f.why = fmt.Sprintf("It runs and isn't ready. Clients get: an error on the server (%q) has prevented the request from succeeding.", lastBad(asked.body))
	}
	ends, message := s.addPod(&f, program)
	words := cmp.Or(lastError(s.files.pods[program]), lastError(strings.Split(message, "\n")))
	path, image, extra := s.programConfig(program)
	why, next, explained := explainArgument(words, path, image, extra)
	if explained {
		f.why, f.next, f.until = why, next, time.Time{}
	} else if asked.err != nil && (ends && words != "" || fatal(words)) {
		f.why = "It ends, and says: " + config.Shorten(criLine.ReplaceAllString(words, ""), maxWords)
	}
	if explained || asked.err != nil && (ends || fatal(words)) {
		f.next = strings.TrimSpace(fmt.Sprintf("%s gbctl logs -k %s/%s-%s:%s shows all that it said.", f.next, kubeSystem, program, s.hostname, program))
	}
	// What a program logs while it answers isn't why it doesn't serve. The kubelet's status
	// can't tell whether it runs: without an API server the kubelet answers nobody, so that
	// its last answer is of the time before.
	if explained || asked.err != nil {
		f.evidence = append(f.evidence, asLog(program, words))
	}
	return one(f)
}

// addPod adds what the kubelet says of a program's container: how it ended, what it
// waits for. It returns whether it has ended, and its last words or those of the runtime.
func (s *snapshot) addPod(f *finding, program string) (ends bool, message string) {
	pod, ok := s.pods[program]
	if !ok {
		return false, ""
	}
	for _, c := range containers(pod) {
		for _, at := range [][]string{{"state", "waiting"}, {"state", "terminated"}, {"lastState", "terminated"}} {
			state, _ := c.At(at...).(map[string]any)
			if state == nil {
				continue
			}
			o := kubeclient.Object(state)
			line := fmt.Sprintf("pod %s/%s: container %s: %s: %s", kubeSystem, program, c.Text("name"), strings.Join(at, "."), o.Text("reason"))
			code, ended := state["exitCode"].(float64)
			// RunContainerError and its like
			failed := ended || o.Text("reason") == backOff || strings.HasSuffix(o.Text("reason"), "Error")
			ends = ends || failed
			if ended {
				line += fmt.Sprintf(" (exit code %d)", int(code))
				f.since = cmp.Or(o.Time("finishedAt"), f.since)
			}
			if m := strings.TrimSpace(o.Text("message")); m != "" {
				if failed && o.Text("reason") != backOff {
					message = m
				}
				line += ": " + m[strings.LastIndex(m, "\n")+1:] // it may be the end of the log
			}
			f.evidence = append(f.evidence, line)
			if o.Text("reason") == backOff {
				f.until = time.Time{}
				f.why = "It ends again and again; the kubelet restarts it after longer and longer pauses."
			}
		}
	}
	return ends, message
}

// started is when a program should have come up: after the start of the cluster, or of its pod.
func (s *snapshot) started(program string) time.Time {
	return latest(s.at(bootstrapTime), s.pods[program].Time("status", "startTime").Add(startTime))
}

func (s *snapshot) programConfig(program string) (path, image string, extra config.Args) {
	c := &s.config.Cluster
	switch program {
	case apiServer:
		return "cluster.apiServer.extraArgs", c.APIServer.Image, c.APIServer.ExtraArgs
	case controllerManager:
		return "cluster.controllerManager.extraArgs", c.ControllerManager.Image, c.ControllerManager.ExtraArgs
	}
	return "cluster.scheduler.extraArgs", c.Scheduler.Image, c.Scheduler.ExtraArgs
}

// backOff is the kubelet's reason for not starting a container that ends again and again.
const backOff = "CrashLoopBackOff"

// containers are the statuses of a pod's containers, those of initialization first.
func containers(pod kubeclient.Object) []kubeclient.Object {
	return append(pod.List("status", "initContainerStatuses"), pod.List("status", "containerStatuses")...)
}
