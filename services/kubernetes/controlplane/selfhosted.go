package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strconv"
	"syscall"
	"time"

	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

const (
	// CheckpointOf is the annotation of a static pod that pod-checkpointer made of a pod of
	// the cluster; its value is that pod's name.
	CheckpointOf = "checkpointer.alpha.coreos.com/checkpoint-of"

	// portPoll is how often it is tried whether a program that runs as a pod of the cluster is
	// gone. portWait is how long its port is waited for.
	portPoll = 200 * time.Millisecond
	portWait = 10 * time.Minute
	// portDial bounds a try: loopback answers at once.
	portDial = 100 * time.Millisecond
	// maxStaticPod bounds the file of a static pod.
	maxStaticPod = 1 << 20
)

// replaced are the programs that still run on this node as pods of DaemonSets, while static pods
// replace them; nil: the kubelet doesn't say. A pod that is being deleted doesn't count: that of
// the only API server can't be deleted from the API before its static pod runs.
func (c *KubeletStaticPodController) replaced(ctx context.Context, v resource.View) map[string]bool {
	if !c.replaces {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, statusBudget)
	defer cancel()
	answer, err := c.podsOfKubelet(ctx, v)
	found := map[string]bool{}
	if errors.Is(err, syscall.ECONNREFUSED) {
		return found // there is no kubelet, which would start a pod again
	}
	if err != nil {
		return nil
	}
	for _, pod := range answer.Items() {
		if pod.Text("metadata", "deletionTimestamp") != "" {
			continue
		}
		for _, owner := range pod.List("metadata", "ownerReferences") {
			if pod.Namespace() == kubeSystem && owner.Text("kind") == "DaemonSet" {
				found[owner.Text("name")] = true
			}
		}
	}
	return found
}

// mustWait: where the control plane was self-hosted until now, a static pod is written when its
// predecessor is gone, and the program's port is free. Earlier it would only fail, and then be
// started after a pause that the kubelet doubles each time, up to 5 minutes. Without an API
// server, the kubelet doesn't say what it runs: then only kube-apiserver must not wait for that.
func (c *KubeletStaticPodController) mustWait(replaced map[string]bool, name string, pod kubeclient.Object) bool {
	if c.since.IsZero() {
		c.since = time.Now()
	}
	if untrusted.Exists(c.path(name)) {
		return false
	}
	if replaced[name] {
		return true
	}
	if time.Since(c.since) > portWait {
		return false
	}
	if replaced == nil && name != apiServer {
		return true
	}
	containers := pod.List("spec", "containers")
	if len(containers) == 0 {
		return false
	}
	port, _ := containers[0].At("startupProbe", "httpGet", "port").(int)
	conn, err := net.DialTimeout("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), portDial)
	if err != nil {
		return false
	}
	_ = conn.Close() // nothing was sent
	return true
}

// removeCheckpoints removes what pod-checkpointer has left, so that it doesn't start the
// programs of a self-hosted control plane beside their static pods.
func removeCheckpoints(dir, staticPods string) error {
	if _, err := untrusted.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	paths, err := untrusted.Glob(staticPods, "*.json")
	if err != nil {
		return fmt.Errorf("look for the checkpoints of pods: %w", err)
	}
	for _, path := range paths {
		text, err := untrusted.ReadFile(path, maxStaticPod)
		if err == nil && bytes.Contains(text, []byte(CheckpointOf)) {
			err = untrusted.Remove(path)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the checkpoint of a pod: %w", err)
		}
	}
	if err := untrusted.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove the checkpoints of pods: %w", err)
	}
	return nil
}
