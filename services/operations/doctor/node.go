package doctor

import (
	"cmp"
	"encoding/base64"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/controlplane"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
)

// manifestApplier makes what is missing.
const manifestApplier = "k8s.ManifestApplyController"

// apiSecrets gets the certificate of a worker's API.
const apiSecrets = "secrets.APIController"

// ofManifest reports whether a resource tells why objects of a manifest aren't there.
func ofManifest(o resource.Object[any]) bool {
	return o.Type == controlplane.BootstrapManifests.Type() || o.Type == controlplane.ManifestResults.Type() || o.Type == controlplane.ManifestDrifts.Type()
}

var nodeConditions = checks{
	"manifests-not-applied":   func(s *snapshot) (out []finding) { return s.manifests(true) },
	"manifest-incomplete":     func(s *snapshot) (out []finding) { return s.manifests(false) },
	"webhook-without-pods":    func(s *snapshot) []finding { return s.unserved(false) },
	"apiservice-without-pods": func(s *snapshot) []finding { return s.unserved(true) },
	"node-not-registered":     nodeMissing,
	"node-not-ready":          nodeNotReady,
	"node-pressure": func(s *snapshot) []finding {
		return lists.Some(s.nodeConditions(), func(c kubeclient.Object) (finding, bool) {
			f := finding{what: "The node has " + c.Text("type") + ".", since: c.Time("lastTransitionTime"), evidence: []string{asCondition(s.hostname, c)}}
			return f, strings.HasSuffix(c.Text("type"), "Pressure") && c.Text("status") == "True"
		})
	},
	"node-cordoned": func(s *snapshot) []finding {
		cordoned := s.cluster != nil && s.cluster.node.At("spec", "unschedulable") == true
		busy := slices.ContainsFunc(s.operations, func(o resource.Object[operation.Spec]) bool { return o.Spec.Ended.IsZero() })
		return when(cordoned && !busy, finding{what: fmt.Sprintf("The node %q is cordoned: new pods don't start on it.", s.hostname), next: "If the work on it is done: kubectl uncordon " + s.hostname + ".",
			evidence: []string{fmt.Sprintf("node %s: spec.unschedulable", s.hostname)}})
	},
	"system-pods-failing": func(s *snapshot) []finding { return append(s.failingPods(true), systemFaults(s)...) },
	"pods-failing":        func(s *snapshot) []finding { return s.failingPods(false) },
	"worker-api-waits": func(s *snapshot) []finding {
		if s.config == nil || s.controlPlane() {
			return nil
		}
		found := s.down("apid", "The machine API of this worker is not up.")
		for _, c := range s.controllers {
			if c.ID == apiSecrets && len(found) > 0 {
				found[0].why = "It has no certificate: " + c.Spec.Error + "."
				found[0].evidence = append(found[0].evidence, asFailure(c))
			}
		}
		return found
	},
	"api-not-up": func(s *snapshot) []finding {
		if s.config != nil && !s.controlPlane() {
			return nil
		}
		return s.down("apid", "The machine API is not up.")
	},
}

// unserved are the webhooks that don't answer, or the APIServices.
func (s *snapshot) unserved(apis bool) []finding {
	if s.cluster == nil {
		return nil
	}
	return lists.Some(s.cluster.refusal, func(r refusal) (finding, bool) {
		f := finding{what: fmt.Sprintf("APIService %s isn't available: %s.", r.name, r.lacks), evidence: []string{strings.ToLower(r.kind) + " " + r.name + ": " + r.lacks}}
		if r.starts {
			f.until = s.at(bootstrapTime)
		}
		if !apis {
			f.what = fmt.Sprintf("Webhook %s of %s %s refuses every request that it is asked about: %s.", r.webhook, r.kind, r.name, r.lacks)
		}
		start := fmt.Sprintf("Start its pods: kubectl -n %s get deployments,pods, and kubectl -n %[1]s scale deployment NAME --replicas=1.", r.namespace)
		f.next = fmt.Sprintf("%s If that is refused, too, or nothing needs it: kubectl delete %s %s.", cmp.Or(map[string]string{"": "Start its server."}[r.namespace], start), strings.ToLower(r.kind), r.name)
		return f, (r.kind == apiService) == apis
	})
}

// manifests are those of which objects aren't there: the node's own, whose drift tells it, or the configuration's.
func (s *snapshot) manifests(own bool) (out []finding) {
	for _, o := range s.troubled {
		if !ofManifest(o) || controlplane.Own(o.Meta) != own || (o.Type == controlplane.ManifestDrifts.Type()) != own {
			continue
		}
		problems := resource.Problems(o.Spec)
		f := finding{what: fmt.Sprintf("Manifest %s isn't made, or not all of it: %s.", o.ID, problems[0]), since: o.Troubled, evidence: problems}
		f.until = map[bool]time.Time{true: s.at(bootstrapTime), false: o.Troubled.Add(problemTime)}[own]
		for _, c := range s.controllers {
			if c.ID == manifestApplier && own {
				f.why = "They can't be created: " + c.Spec.Error + "."
				f.evidence = append([]string{asFailure(c)}, problems...)
			}
		}
		out = append(out, f)
	}
	return out
}

// nodeMissing: the kubelet runs, and Kubernetes has no Node.
func nodeMissing(s *snapshot) []finding {
	c := s.cluster
	// A node that has nothing but the bootstrap token to ask with isn't allowed to see nodes.
	if c == nil || c.err != nil || !kubeclient.IsNotFound(c.nodeErr) && (c.nodeErr == nil || !s.files.seen || s.files.client != nil || s.controlPlane()) {
		return nil
	}
	f := finding{what: fmt.Sprintf("Kubernetes doesn't know the node %q.", s.hostname), until: s.at(bootstrapTime)}
	if svc := s.services[kubelet.ID]; svc.Reason == kubelet.NodeDeleted {
		f.code, f.until, f.evidence = svc.Reason, time.Time{}, []string{svc.asStatus()}
		return one(f)
	}
	if c.nodeErr != nil {
		f.evidence = append(f.evidence, fmt.Sprintf("%s as %s: %v", c.through, c.as, c.nodeErr))
	}
	if s.files.seen && s.files.client == nil {
		f.evidence = append(f.evidence, clientFile+": none")
	}
	pending := 0
	for _, csr := range c.csrs {
		if csr.Text("spec", "signerName") != "kubernetes.io/kube-apiserver-client-kubelet" {
			continue
		}
		if csrCondition(csr) == "Pending" {
			pending++
		}
		f.evidence = append(f.evidence, asRequest(csr))
	}
	switch {
	case c.csrsErr != nil:
		f.evidence = append(f.evidence, fmt.Sprintf("csr: %v", c.csrsErr))
	case pending > 0:
		f.why = "No control plane has decided about the certificate requests of kubelets, which one does within seconds."
		f.next = "gbctl logs controller-runtime of the control planes shows why none does. kubectl certificate approve NAME approves one by hand."
	case s.files.client == nil:
		f.evidence = append(f.evidence, "csr: none of a kubelet")
		f.why = "The kubelet has no client certificate, and hasn't requested one: it hasn't reached the endpoint, or its token isn't accepted."
	}
	f.evidence = append(f.evidence, asLog("kubelet", lastError(s.tail("kubelet", tailLines))))
	return one(f)
}

// asRequest is a request in a line, with the reason if it was denied.
func asRequest(csr kubeclient.Object) string {
	line := fmt.Sprintf("csr %s  %s  %s", csr.Name(), csr.Text("spec", "username"), csrCondition(csr))
	if c := csr.ConditionOf(kubeclient.Denied); c != nil {
		line += ": " + c.Text("message")
	}
	return line
}

// csrCondition is a request's condition as kubectl prints it.
func csrCondition(csr kubeclient.Object) string {
	all := lists.Of(csr.List("status", "conditions"), func(c kubeclient.Object) string { return c.Text("type") })
	if csr.Text("status", "certificate") != "" {
		all = append(all, "Issued")
	}
	return cmp.Or(strings.Join(all, ","), "Pending")
}

func (s *snapshot) nodeConditions() []kubeclient.Object {
	if s.cluster == nil {
		return nil
	}
	return s.cluster.node.List("status", "conditions")
}

// nodeNotReady: the Node is there and not Ready.
func nodeNotReady(s *snapshot) []finding {
	for _, c := range s.nodeConditions() {
		if c.Text("type") != "Ready" || c.Text("status") == "True" {
			continue
		}
		f := finding{what: fmt.Sprintf("The node %q is not Ready.", s.hostname), since: c.Time("lastTransitionTime"), evidence: []string{asCondition(s.hostname, c)}}
		f.until = s.settles(f.since)
		switch m := c.Text("message"); {
		case c.Text("status") == "Unknown":
			f.why, f.next, f.until = "The kubelet has stopped telling Kubernetes how the node is.", "See gbctl service kubelet, and whether the node reaches the endpoint.", time.Time{}
		case strings.Contains(m, "cni") || strings.Contains(m, "NetworkPluginNotReady"):
			f.why = "The pod network isn't up on this node (" + string(s.config.Cluster.Network.CNI.Name) + ")."
			for _, line := range s.tail(containerd.ID, tailLines) {
				m := append(unusableNetwork.FindStringSubmatch(line), "", "")
				// what it said before has another consequence
				if at, _ := time.Parse(time.RFC3339Nano, m[1]); at.After(f.since.Add(-time.Minute)) {
					f.why, f.until = fmt.Sprintf("A file of the pod network is broken: %s: %s.", m[2], m[3]), time.Time{}
					f.next = "Remove the pods that wrote it, and restart the node, which empties that folder unless machine.kubelet.persist keeps it: gbctl -n ADDRESS reboot."
				}
			}
			if s.config.Cluster.Network.CNI.Name == "none" {
				f.why, f.next, f.until = "cluster.network.cni.name is none, so the pod network is to be installed by you, and it isn't.", "Install a CNI in the cluster.", time.Time{}
			}
		}
		f.evidence = append(f.evidence, lists.Some(s.cluster.pods, func(pod kubeclient.Object) (string, bool) {
			return asPod(pod), pod.Namespace() == kubeSystem && !pod.Condition("Ready")
		})...)
		return one(f)
	}
	// Kubernetes doesn't say it now, or says what was so before the boot.
	unanswered := s.cluster == nil || s.cluster.err != nil || s.cluster.nodeErr != nil
	for _, fault := range s.health.Faults {
		if fault.Object == kubelet.NodeObject && (fault.Code == kubelet.FormerBoot || unanswered && fault.Code != kubelet.NoNode) {
			return one(finding{what: "Kubernetes doesn't serve on this node: " + fault.Text + ".", why: "Its kubelet, or all API servers, haven't answered since.", since: fault.Since,
				until: s.settles(fault.Since), evidence: []string{"resource NodeHealths " + kubelet.HealthID + ": " + s.health.Serves}})
		}
	}
	return nil
}

// unusableNetwork matches what containerd logs of a file in /etc/cni/net.d that it can't read: then no pod gets a
// network.
var unusableNetwork = regexp.MustCompile(`^time="([^"]+)" .*failed to load CNI config (?:list )?file (\S+): (.+?)(?:: invalid cni config.*)?"`)

func asCondition(node string, c kubeclient.Object) string {
	return fmt.Sprintf("node %s: %s=%s %s: %s", node, c.Text("type"), c.Text("status"), c.Text("reason"), c.Text("message"))
}

// asPod is a pod in a line: its phase, and what its containers say.
func asPod(pod kubeclient.Object) string {
	line := fmt.Sprintf("pod %s/%s: %s", pod.Namespace(), pod.Name(), pod.Text("status", "phase"))
	for _, c := range containers(pod) {
		for _, at := range [][]string{{"state", "waiting"}, {"lastState", "terminated"}} {
			if reason := c.Text(append(at, "reason")...); reason != "" {
				line += fmt.Sprintf("; %s %s %s", c.Text("name"), reason, c.Text(append(at, "message")...))
			}
		}
	}
	return line
}

// unstarted are the reasons of containers that end again and again, or can't be started.
var unstarted = []string{"CrashLoopBackOff", "RunContainerError", "CreateContainerConfigError", "CreateContainerError"}

// failingPods of kube-system, or of the other namespaces, end again and again, or can't be started. Those of the
// control plane have conditions of their own, and so have images.
func (s *snapshot) failingPods(system bool) (out []finding) {
	if s.cluster == nil {
		return nil
	}
	for _, pod := range s.cluster.pods {
		if (pod.Namespace() == kubeSystem) != system || system && pod.Text("metadata", "labels", "tier") == "control-plane" {
			continue
		}
		for _, c := range containers(pod) {
			if r := c.Text("state", "waiting", "reason"); slices.Contains(unstarted, r) {
				out = append(out, finding{what: fmt.Sprintf("Pod %s/%s doesn't run: %s.", pod.Namespace(), pod.Name(), r), evidence: []string{asPod(pod)},
					next: fmt.Sprintf("kubectl -n %s logs %s -c %s --previous shows its last log lines, and kubectl -n %[1]s describe pod %[2]s why it can't be started.", pod.Namespace(), pod.Name(), c.Text("name"))})
			}
		}
	}
	return out
}

// systemFaults are the node's own pods that aren't there, or aren't ready for another reason.
func systemFaults(s *snapshot) []finding {
	return lists.Some(s.health.Faults, func(f kubelet.Fault) (finding, bool) {
		told := f.Object == kubelet.NodeObject || slices.Contains(unstarted, string(f.Code)) || strings.Contains(string(f.Code), "Image")
		return finding{what: "The " + f.Object + " of this node doesn't work: " + f.Text + ".", why: "Kubernetes doesn't see its pod here, or not as ready.",
			since: f.Since, until: s.settles(f.Since), evidence: []string{"resource NodeHealths " + kubelet.HealthID}}, s.health.Serves != kubelet.Unknown && !told
	})
}

// bootstrapTime is what a cluster's first start may take: images over a slow line,
// or an emulated machine.
const bootstrapTime = 5 * time.Minute

// nameTime is longer than the pause between two requests of a kubelet for a certificate.
const nameTime = 3 * time.Minute

var kubeletConditions = checks{
	"node-name-taken":     nameTaken,
	"kubelet-not-running": kubeletDown,
}

// nameTaken is said on both machines: by the kubelet that waits, and by the requests that were
// denied since the other one has been up.
func nameTaken(s *snapshot) []finding {
	svc := s.services[kubelet.ID]
	if !svc.Up && svc.Reason == roster.NameTaken {
		return one(finding{what: fmt.Sprintf("Another machine has the name %q, so this one doesn't register.", s.hostname), since: s.at(svc.Since), evidence: []string{svc.asStatus()}})
	}
	if !svc.Up || s.cluster == nil {
		return nil
	}
	for _, csr := range s.cluster.csrs {
		text, _ := base64.StdEncoding.DecodeString(csr.Text("spec", "request"))
		request, err := pki.ParseRequest(text)
		if err != nil || request.Subject.CommonName != config.NodeUser+s.hostname {
			continue
		}
		for _, c := range csr.List("status", "conditions") {
			if at := c.Time("lastTransitionTime"); c.Text("reason") == string(roster.NameTaken) && at.After(s.at(svc.Since)) && s.now.Sub(at) < nameTime {
				return one(finding{what: fmt.Sprintf("Another machine wants the name %q of this node, and doesn't get it.", s.hostname), severity: warning, evidence: []string{asRequest(csr)}})
			}
		}
	}
	return nil
}

func kubeletDown(s *snapshot) []finding {
	if s.config == nil {
		return nil
	}
	found := s.down(kubelet.ID, "The kubelet is not running.")
	if s.services[kubelet.ID].Reason == kubelet.NodeDeleted {
		return nil // node-not-registered says so
	}
	for i := range found {
		f := &found[i]
		k := s.config.Machine.Kubelet
		if why, next, ok := explainArgument(strings.Join(f.evidence, "\n"), "machine.kubelet.extraArgs", k.Image, k.ExtraArgs); ok {
			f.why, f.next = why, next
			continue
		}
		if svc := s.services[kubelet.ID]; svc.State == dag.Running {
			f.what = "The kubelet runs and is not healthy."
			f.why = "Its health check fails; its last log lines show why."
		}
	}
	return found
}
