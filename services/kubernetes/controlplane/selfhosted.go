package controlplane

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

const (
	// CheckpointOf is the annotation of a static pod that pod-checkpointer made of a pod of
	// the cluster; its value is that pod's name.
	CheckpointOf = "checkpointer.alpha.coreos.com/checkpoint-of"

	// portPoll is how often the port of a program is tried that still runs as a pod of the
	// cluster, and portWait how long it is waited for.
	portPoll = 200 * time.Millisecond
	portWait = 10 * time.Minute
	// portDial bounds a try: loopback answers at once.
	portDial = 100 * time.Millisecond
)

// mustWait: where the control plane was self-hosted until now, a static pod is written when
// the program's port is free. Earlier it would only fail, and then be started after a pause
// that the kubelet doubles each time, up to 5 minutes.
func (c *KubeletStaticPodController) mustWait(file string, pod kubeclient.Object) bool {
	if !c.replaces {
		return false
	}
	if c.since.IsZero() {
		c.since = time.Now()
	}
	if _, err := os.Stat(file); err == nil || time.Since(c.since) > portWait {
		return false
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
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	paths, _ := filepath.Glob(filepath.Join(staticPods, "*.json")) // the pattern is right
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err == nil && bytes.Contains(text, []byte(CheckpointOf)) {
			err = os.Remove(path)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the checkpoint of a pod: %w", err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove the checkpoints of pods: %w", err)
	}
	return nil
}
