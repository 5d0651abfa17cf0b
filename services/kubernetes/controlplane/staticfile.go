package controlplane

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"strconv"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
)

const (
	// startsAnnotation counts how often a pod that hasn't begun was written again.
	startsAnnotation = "garboard.dev/starts"
	// maxStarts bounds that: with one each second, it is longer than a pod takes to end
	// (terminationGracePeriodSeconds, 30 by default).
	maxStarts = 60
)

// starts is how often the same pod was written.
type starts struct {
	uid   string
	again int
}

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
	if c.starts == nil {
		c.starts = map[string]starts{}
	}
	if c.starts[name].uid != uid {
		c.starts[name] = starts{uid: uid}
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

// lacks reports whether a pod whose file was written stays as it is, because the image of its new form isn't here: the kubelet would
// end it first.
func (c *KubeletStaticPodController) lacks(ctx context.Context, name string, pod kubeclient.Object) bool {
	if c.images == nil {
		c.images, c.lacking = map[string]string{}, map[string]error{}
	}
	before, image, why := c.images[name], pod.List("spec", "containers")[0].Text("image"), error(nil)
	if before != "" && before != image && c.have != nil {
		why = c.have(ctx, image, fmt.Sprintf("goes on with %s, and not with that of the configuration", before))
	}
	if why == nil {
		c.images[name] = image
		delete(c.lacking, name)
		return false
	}
	c.lacking[name] = why
	return true
}

// startAgain writes the pods again that the kubelet has, but hasn't begun.
func (c *KubeletStaticPodController) startAgain(v resource.View, unstarted []kubeclient.Object) error {
	for _, seen := range unstarted {
		name := seen.Text("metadata", "labels", "k8s-app")
		s, known := c.starts[name]
		if !known || seen.Text("metadata", "uid") != s.uid || s.again == maxStarts || c.lacking[name] != nil {
			continue
		}
		pod, err := StaticPods.Get(v, name)
		if err != nil || pod.Phase == resource.PhaseTearingDown {
			continue // its file is about to go
		}
		s.again++
		c.starts[name] = s
		data, err := c.file(name, pod.Spec)
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
