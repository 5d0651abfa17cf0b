package controlplane

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

const (
	// startsAnnotation counts how often a pod that hasn't begun was written again.
	startsAnnotation = "garboard.dev/starts"
	// maxStarts bounds that: with one each second, it is longer than a pod takes to end
	// (terminationGracePeriodSeconds, 30 by default).
	maxStarts = 60

	// deafAfter is an outage of etcd after which the API server's client may not try again for longer than the API
	// server takes to start. Its pauses grow by 1.6 each time, up to deafFor
	// (https://github.com/grpc/grpc/blob/master/doc/connection-backoff.md).
	deafAfter = 20 * time.Second
	deafFor   = 2 * time.Minute
)

// starts is a pod that was written, and how often.
type starts struct {
	uid, image string
	pod        kubeclient.Object
	again      int
	sick       error // why the image doesn't work

	// The image is on trial since the file was written, or what the program needs has served; it had so many restarts
	// then. The kubelet's startTime may be that of a former pod of the name.
	since time.Time
	ends  int
}

func imageOf(pod kubeclient.Object) string { return pod.List("spec", "containers")[0].Text("image") }

// file is the content of a static pod's file. The kubelet starts no static pod while another
// one of its name ends, and tries again only after 10 to 15 s (backOffPeriod in
// pkg/kubelet/kubelet.go, allowPodStart in pod_workers.go). It tries at once when the same pod
// is updated. For the kubelet, the same pod is one with the same UID, and without a UID in the
// file it makes one of the whole content. So the file has a UID, which is a hash of all but the
// annotation that changes.
func (c *KubeletStaticPodController) file(name string, pod kubeclient.Object) ([]byte, error) {
	content, err := json.Marshal(pod) // takes less time than YAML
	if err != nil {
		return nil, fmt.Errorf("encode static pod %s: %w", name, err)
	}
	hash := sha256.Sum256(content)
	uid := hex.EncodeToString(hash[:16])
	if c.starts[name].uid != uid {
		c.starts[name] = starts{uid: uid, image: imageOf(pod), pod: pod, since: time.Now()}
	}
	meta, _ := pod["metadata"].(object)
	meta = maps.Clone(meta)
	meta["uid"] = uid
	if again := c.starts[name].again; again > 0 {
		annotations, _ := meta["annotations"].(object)
		annotations = maps.Clone(annotations)
		annotations[startsAnnotation] = strconv.Itoa(again)
		meta["annotations"] = annotations
	}
	pod = maps.Clone(pod)
	pod["metadata"] = meta
	return yaml.Marshal(pod)
}

// lacks reports whether a pod whose file was written stays as it is: the image of its new form is sick, or isn't here.
// The kubelet would end it first.
func (c *KubeletStaticPodController) lacks(ctx context.Context, name string, pod kubeclient.Object) bool {
	if c.starts == nil {
		c.starts, c.good, c.bad, c.lacking = map[string]starts{}, map[string]starts{}, map[string]starts{}, map[string]error{}
	}
	before, why := c.starts[name].image, error(nil)
	instead := fmt.Sprintf("goes on with %s, and not with that of the configuration", before)
	if bad := c.bad[name]; reflect.DeepEqual(bad.pod, pod) {
		why = fmt.Errorf("%s: %w", instead, bad.sick)
	} else if before != "" && before != imageOf(pod) && c.have != nil {
		why = c.have(ctx, imageOf(pod), instead)
	}
	if why == nil {
		delete(c.lacking, name)
		return false
	}
	c.lacking[name] = why
	return true
}

// follow looks at the pods as the kubelet has them. One that it hasn't begun is written again, and so is an API server
// that etcd's outage has made deaf. One whose new image doesn't work becomes its former form, by the rule for services
// (containerd.Runner): what was ready with its image keeps it. While what a program needs doesn't serve, its image
// isn't on trial.
func (c *KubeletStaticPodController) follow(ctx context.Context, v resource.View, seen []kubeclient.Object) error {
	serves := slices.ContainsFunc(seen, func(pod kubeclient.Object) bool {
		return pod.Text("metadata", "labels", "k8s-app") == apiServer && pod.Condition("Ready")
	})
	for _, pod := range seen {
		name, status := pod.Text("metadata", "labels", "k8s-app"), PodStatus(pod["status"].(object))
		now, good := c.starts[name], c.good[name]
		restarts, words := status.Fails()
		if _, err := StaticPods.Get(v, name); err != nil || pod.Text("metadata", "uid") != now.uid {
			continue // its file is about to go, or it is
		}
		if !c.up.After(c.down) || name != apiServer && !serves {
			now.since, now.ends = time.Now(), restarts
			c.starts[name] = now
		}
		switch {
		case status.Ready():
			c.good[name] = now
			continue
		case good.image != "" && good.image != now.image && (restarts-now.ends >= containerd.TrialEnds || time.Since(now.since) > containerd.TrialTime):
			now.sick = reason.With(containerd.ImageSick, fmt.Errorf("image %s doesn't work: the pod has %d restarts, and isn't ready: %s", now.image, restarts, cmp.Or(words, "it runs")))
			c.bad[name], now = now, good
		case name == apiServer && c.deaf(ctx, pod):
			c.heard = c.up
			v.Log().Info(fmt.Sprintf("%s is started again: it hasn't noticed that etcd, which didn't serve for %s, does again", name, c.up.Sub(c.down).Round(time.Second)))
			return c.kill(ctx, strings.TrimPrefix(pod.List("status", "containerStatuses")[0].Text("containerID"), "containerd://"))
		case containers(status) == 0 && now.again < maxStarts:
			now.again++
			c.starts[name] = now
		default:
			continue
		}
		data, err := c.file(name, now.pod)
		if err == nil {
			err = untrusted.WriteFile(c.path(name), data, staticPodMode)
		}
		if err != nil {
			return fmt.Errorf("write static pod %s again: %w", name, err)
		}
	}
	return nil
}

// deaf reports whether an API server that runs since before the end of a long outage of etcd hasn't noticed that end.
// It is asked itself: the kubelet asks it every 5 s. It is killed once for each outage: its orderly end would wait for
// requests that wait for etcd.
func (c *KubeletStaticPodController) deaf(ctx context.Context, pod kubeclient.Object) bool {
	began := append(pod.List("status", "containerStatuses"), nil)[0].Time("state", "running", "startedAt")
	long := !c.down.IsZero() && c.up.Sub(c.down) >= deafAfter && time.Since(c.up) < deafFor
	return long && c.heard != c.up && !began.IsZero() && began.Before(c.up) && !kept(ctx, pod, pod["status"].(object)).Ready()
}

// path of the file of a static pod.
func (c *KubeletStaticPodController) path(name string) string {
	return filepath.Join(c.staticPodsDir, staticPodPrefix+name+".yaml")
}

// openVolumes gives a program what it is to write to in its volumes, and what only root may read there:
// its configuration files, the audit log, and extraVolumes, also with content of a release in which it
// was root. These are files, and directories with files only. It returns what the program can't use.
func openVolumes(program string, pod kubeclient.Object) (problems []error) {
	uid := boot.User(program)
	for i, mount := range pod.List("spec", "containers")[0].List("volumeMounts") {
		path := pod.List("spec", "volumes")[i].Text("hostPath", "path")
		readOnly, _ := mount["readOnly"].(bool)
		writes := !readOnly && strings.HasPrefix(path, boot.EphemeralDir+"/")
		if writes {
			_ = untrusted.MkdirAll(path, 0o700) // or a file is there
		}
		below, _ := untrusted.Glob(path, "*")
		for j, path := range append([]string{path}, below...) {
			if readable(path, uid) && (!writes || j > 0) {
				continue
			}
			err := fs.ErrPermission // it is the node's own
			if !strings.HasPrefix(path, "/system/") {
				err = untrusted.Give(path, boot.Owner(program), 1)
			}
			if err != nil {
				problems = append(problems, fmt.Errorf("%s runs as user %d, and may not use %s of its extraVolumes: %w", program, uid, path, err))
				if j == 0 {
					break
				}
			}
		}
	}
	return problems
}

// readable reports whether a user may read what is at a path. What isn't there may come later.
func readable(path string, uid int) bool {
	info, err := untrusted.Stat(path)
	if err != nil {
		return true
	}
	st, _ := info.Sys().(*syscall.Stat_t)
	mode, need := info.Mode().Perm(), fs.FileMode(0o4)
	if info.IsDir() {
		need = 0o5
	}
	return int(st.Uid) == uid && mode>>6&need == need || int(st.Gid) == uid && mode>>3&need == need || mode&need == need
}
