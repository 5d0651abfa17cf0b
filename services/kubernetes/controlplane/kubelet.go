package controlplane

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/network"
)

const (
	// staticPodPrefix is the prefix of our files; a user's own static pods may be
	// in the same directory.
	staticPodPrefix = "garboard-"
	staticPodMode   = 0o600
	fileMode        = 0o600 // the programs' configuration files
	dirMode         = 0o755

	// How often the kubelet is asked about the pods: they start within seconds,
	// and then rarely change.
	statusSoon   = time.Second
	statusLater  = 10 * time.Second
	statusBudget = 5 * time.Second
)

// KubeletStaticPodController writes the pods for the kubelet and asks it for their status.
type KubeletStaticPodController struct {
	staticPodsDir, filesDir, checkpointsDir, kubeletURL string

	// replaces is set while the control plane is self-hosted, and until its static pods have
	// been written.
	replaces bool
	// cleaned: checkpoints that an earlier boot has left are removed. New ones aren't this
	// node's to remove.
	cleaned bool
	since   time.Time // the control plane isn't self-hosted any more

	// By the name of the static pod: what its file has, what was ready and is gone back to, and what doesn't work. They
	// are in memory: after a boot, there is nothing to go back to.
	starts, good, bad map[string]starts
	// why pods stay as they are, by their names
	lacking map[string]error
	have    func(ctx context.Context, image, instead string) error // Options.Have

	// When the member of etcd on this node didn't serve any more, and when it did again. heard is the up for which the
	// API server was started again.
	down, up, heard time.Time
	kill            func(ctx context.Context, container string) error // Options.Kill

	// client is kept for its connection: on an idle node, a handshake for each
	// request would be most of the processor time.
	client kubeclient.Kept
	retry  time.Duration // the pause after the last failure; 0 after success
}

// Reconcile begins with the files: they don't wait for a kubelet that can't answer yet, or a program that is asked. The
// files of kube-apiserver are never older than its pod, which is made from the same configuration.
func (c *KubeletStaticPodController) Reconcile(ctx context.Context, v resource.View) (time.Duration, error) {
	pods := StaticPods.List(v)
	if len(pods) == 0 {
		// Either the node is no control plane, or nothing is known yet: a file from
		// the previous boot, if /etc has kept it, must not be removed and made again.
		return 0, nil
	}
	status, err := BootstrapStatuses.Get(v, "control-plane")
	if err != nil {
		return 0, resource.IgnoreNotFound(err)
	}
	if status.Spec.SelfHosted {
		c.replaces, c.cleaned, c.since = true, false, time.Time{}
		return 0, c.removeStale(v, nil)
	}
	if !c.cleaned || c.replaces {
		if err := errors.Join(boot.IgnoreMissing(os.Remove(boot.SelfHostedFile)), removeCheckpoints(c.checkpointsDir, c.staticPodsDir)); err != nil {
			return 0, err
		}
		c.cleaned = true
	}
	if err := c.writeFiles(v); err != nil {
		return 0, err
	}
	switch _, ready := etcd.Ready(v); {
	case ready && !c.up.After(c.down):
		c.up = time.Now()
	case !ready && c.up.After(c.down):
		c.down = time.Now()
	}
	wanted, wroteAny, waits := map[string]bool{}, false, false
	replaced := c.replaced(ctx, v)
	for _, pod := range pods {
		if err := StaticPods.AddFinalizer(v, pod.ID, fmt.Sprintf("k8s.StaticPodStatus(%q)", pod.ID)); err != nil {
			return 0, err
		}
		wanted[filepath.Base(c.path(pod.ID))] = true
		if c.replaces && c.mustWait(replaced, pod.ID, pod.Spec) {
			waits = true
			continue
		}
		if c.lacks(ctx, pod.ID, pod.Spec) {
			continue
		}
		wrote, err := c.writePod(v, pod.ID, pod.Spec)
		if err != nil {
			return 0, err
		}
		wroteAny = wroteAny || wrote
	}
	if err := c.removeStale(v, wanted); err != nil {
		return 0, err
	}
	if waits {
		_, _ = c.refresh(ctx, v) // the next try follows soon
		return portPoll, nil
	}
	c.replaces = false
	if wroteAny {
		return statusSoon, nil // the kubelet has just seen it, and another pod may follow
	}
	asking, stop := v.Unchanged(ctx)
	defer stop()
	ready, err := c.refresh(asking, v)
	if asking.Err() != nil {
		return 0, nil // what has changed comes first
	}
	if err != nil {
		c.retry = sleep.Longer(c.retry, statusSoon, statusLater)
		return 0, resource.RetryIn(fmt.Errorf("error refreshing pod status: %w", err), c.retry)
	}
	c.retry = 0
	if ready && len(c.lacking) == 0 {
		return statusLater, nil
	}
	return statusSoon, nil
}

// writeFiles writes the configuration files of kube-apiserver.
func (c *KubeletStaticPodController) writeFiles(v resource.View) error {
	cfg, err := controlPlaneConfig(v)
	if err != nil || cfg == nil {
		return err
	}
	files, err := apiServerFiles(&cfg.Cluster.APIServer)
	if files == nil {
		return err // otherwise StaticPodController says it
	}
	dir := filepath.Join(c.filesDir, apiServer)
	if err := untrusted.MkdirAll(dir, dirMode); err != nil {
		return err
	}
	for name, data := range files {
		if _, err := untrusted.WriteChanged(filepath.Join(dir, name), data, fileMode); err != nil {
			return err
		}
	}
	return nil
}

func (c *KubeletStaticPodController) writePod(v resource.View, name string, pod kubeclient.Object) (bool, error) {
	data, err := c.file(name, pod)
	if err != nil {
		return false, err
	}
	if err := untrusted.MkdirAll(c.staticPodsDir, dirMode); err != nil {
		return false, fmt.Errorf("write static pod %s: %w", name, err)
	}
	path, problems := c.path(name), openVolumes(name, pod)
	wrote, err := untrusted.WriteChanged(path, data, staticPodMode)
	if wrote && err == nil {
		v.Log().Info(fmt.Sprintf("writing static pod %q", path))
		for _, problem := range problems {
			v.Log().Warn(problem.Error())
		}
	}
	return wrote, err
}

func (c *KubeletStaticPodController) removeStale(v resource.View, wanted map[string]bool) error {
	entries, err := untrusted.ReadDir(c.staticPodsDir)
	if boot.IgnoreMissing(err) != nil {
		return fmt.Errorf("look for stale static pods: %w", err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), staticPodPrefix) || wanted[e.Name()] {
			continue
		}
		path := filepath.Join(c.staticPodsDir, e.Name())
		v.Log().Info(fmt.Sprintf("removing static pod %q", path))
		if err := boot.IgnoreMissing(untrusted.Remove(path)); err != nil {
			return fmt.Errorf("remove stale static pod: %w", err)
		}
	}
	return nil
}

// podsOfKubelet asks the kubelet for all its pods. It uses loopback, but also verifies that the
// certificate is the kubelet's: any process with the host's network may listen on that port before
// the kubelet does.
func (c *KubeletStaticPodController) podsOfKubelet(ctx context.Context, v resource.View) (kubeclient.Object, error) {
	o, err := secrets.Kubernetes.Get(v, secrets.KubernetesID)
	hostname, none := network.Hostnames.Get(v, network.HostnameID)
	if err = cmp.Or(err, none); err == nil {
		err = c.client.Use(kubeclient.Options{
			Server: c.kubeletURL, ServerName: hostname.Spec, CA: o.Spec.Trusted, Cert: o.Spec.KubeletClient.Crt, Key: o.Spec.KubeletClient.Key,
		})
	}
	if err != nil {
		return nil, err
	}
	answer, err := c.client.Raw(ctx, "/pods")
	if err != nil {
		return nil, fmt.Errorf("error fetching pod status: %w", err)
	}
	return answer, nil
}

// refresh asks the kubelet, and reports whether all pods are ready.
func (c *KubeletStaticPodController) refresh(ctx context.Context, v resource.View) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, statusBudget)
	defer cancel()
	answer, err := c.podsOfKubelet(ctx, v)
	if err != nil {
		return false, err
	}
	ready, seen, err := publishStatuses(ctx, v, answer, c.lacking)
	if err != nil {
		return false, err
	}
	return ready, c.follow(ctx, v, seen)
}
