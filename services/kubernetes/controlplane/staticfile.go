package controlplane

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"strconv"
	"time"

	"gopkg.in/yaml.v3"

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
)

// starts is a pod that was written, and how often.
type starts struct {
	uid, image string
	pod        kubeclient.Object
	again      int
	sick       error // why the image doesn't work
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
		c.starts[name] = starts{uid: uid, image: imageOf(pod), pod: pod}
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

// lacks reports whether a pod whose file was written stays as it is: the image of its new form is sick, or isn't here. The kubelet would end it
// first.
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

// follow looks at the pods as the kubelet has them. One that it hasn't begun is written again. One whose new image doesn't work becomes its former
// form, by the rule for services (containerd.Runner): what was ready with its image keeps it.
func (c *KubeletStaticPodController) follow(v resource.View, seen []kubeclient.Object) error {
	for _, pod := range seen {
		name, status := pod.Text("metadata", "labels", "k8s-app"), PodStatus(pod["status"].(object))
		now, good, began := c.starts[name], c.good[name], pod.Time("status", "startTime")
		restarts, words := status.Fails()
		wanted, err := StaticPods.Get(v, name)
		switch {
		case err != nil || wanted.Phase == resource.PhaseTearingDown || pod.Text("metadata", "uid") != now.uid:
			continue // its file is about to go, or it is
		case status.Ready():
			c.good[name] = now
			continue
		case good.image != "" && good.image != now.image && (restarts >= containerd.TrialEnds || !began.IsZero() && time.Since(began) > containerd.TrialTime):
			now.sick = reason.With(containerd.ImageSick, fmt.Errorf("image %s doesn't work: the pod has %d restarts, and isn't ready: %s", now.image, restarts, cmp.Or(words, "it runs")))
			c.bad[name], now = now, good
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

// path of the file of a static pod.
func (c *KubeletStaticPodController) path(name string) string {
	return filepath.Join(c.staticPodsDir, staticPodPrefix+name+".yaml")
}
