package controlplane

import (
	"context"
	"crypto/tls"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

// publishStatuses publishes the statuses of the control plane's pods, from the
// kubelet's list of its static pods. It returns whether all are ready, and the
// pods with these statuses. lacking is why pods stay as they are.
func publishStatuses(ctx context.Context, v resource.View, answer kubeclient.Object, lacking map[string]error) (ready bool, seen []kubeclient.Object, err error) {
	statuses, readyCount := map[string]PodStatus{}, 0
	for _, pod := range answer.Items() {
		meta, _ := pod.At("metadata", "annotations").(map[string]any)
		if _, checkpoint := meta[CheckpointOf]; checkpoint {
			continue
		}
		if meta["kubernetes.io/config.source"] != "file" || pod.Namespace() != kubeSystem || !slices.Contains(Programs, pod.Text("metadata", "labels", "k8s-app")) {
			continue
		}
		id := pod.Namespace() + "/" + pod.Name()
		status, _ := pod["status"].(map[string]any)
		if version, known := meta[configVersionAnnotation]; known && status != nil {
			status[ConfigVersion] = version
			status[SecretsVersion] = meta[secretsVersionAnnotation]
			status["uid"] = pod.Text("metadata", "uid") // a hash of all
		}
		// The kubelet forgets the status of a pod that it runs, for a minute at most, when it replaces the pod's object
		// in the API server.
		if before, err := StaticPodStatuses.Get(v, id); err == nil && status["uid"] == before.Spec["uid"] && containers(status) == 0 && containers(before.Spec) > 0 {
			status = maps.Clone(kept(ctx, pod, before.Spec))
			delete(status, Lacks)
		}
		if why := lacking[pod.Text("metadata", "labels", "k8s-app")]; why != nil && status != nil {
			status[Lacks] = object{"reason": string(reason.Of(why)), "message": why.Error()}
		}
		if PodStatus(status).Ready() {
			readyCount++
		}
		statuses[id], pod["status"] = status, status
		seen = append(seen, pod)
	}
	if err := StaticPodStatuses.Replace(v, statuses); err != nil {
		return false, nil, err
	}
	return readyCount == len(Programs), seen, nil
}

// containers is how many containers of a pod the kubelet has begun.
func containers(s PodStatus) int { return len(kubeclient.Object(s).List("containerStatuses")) }

// Fails is how often the pod's container was started again, and why it doesn't run, as far as the kubelet knows it.
func (s PodStatus) Fails() (restarts int, why string) {
	for _, c := range kubeclient.Object(s).List("containerStatuses") {
		restarts, _ = strconv.Atoi(fmt.Sprint(c["restartCount"]))
		why = strings.Trim(c.Text("state", "waiting", "reason")+": "+c.Text("state", "waiting", "message"), ": ")
		if log := strings.TrimSpace(c.Text("lastState", "terminated", "message")); log != "" {
			why = strings.Trim(why+"; it logged: "+log[strings.LastIndex(log, "\n")+1:], "; ")
		}
	}
	return restarts, why
}

// probeBudget bounds a probe of a program on this node.
const probeBudget = 2 * time.Second

// kept is the status of before. A program that wasn't ready then is asked itself, as the
// kubelet would.
func kept(ctx context.Context, pod kubeclient.Object, before PodStatus) PodStatus {
	specs := pod.List("spec", "containers")
	if before.Ready() || len(specs) == 0 {
		return before
	}
	probe := specs[0]
	ctx, cancel := context.WithTimeout(ctx, probeBudget)
	defer cancel()
	url := "https://" + net.JoinHostPort("127.0.0.1", fmt.Sprint(probe.At("readinessProbe", "httpGet", "port"))) + probe.Text("readinessProbe", "httpGet", "path")
	// Probes don't verify certificates
	// (https://kubernetes.io/docs/concepts/configuration/liveness-readiness-startup-probes/).
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
	if dag.HTTPCheckBy(client, url)(ctx) != nil {
		return before
	}
	ready := maps.Clone(before)
	ready["conditions"] = list{object{"type": "Ready", "status": "True"}}
	return ready
}
