package checkpoint

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Annotations of parents and of checkpoints, and the label of the pod-checkpointer's pods.
const (
	Wanted   = "checkpointer.alpha.coreos.com/checkpoint"    // "true"
	Of       = "checkpointer.alpha.coreos.com/checkpoint-of" // the name of the parent
	AppLabel = "k8s-app"
	AppName  = "pod-checkpointer"
)

// A Source is a Secret or a ConfigMap whose files a checkpoint needs.
type Source struct {
	Kind     string // secrets or configmaps, as in paths of the API
	Name     string
	Optional bool
	// Paths are the names of the files by key; nil: each key is the name of its file.
	Paths map[string]string
	Dir   string // for the files
}

// ID returns the ID of a pod.
func ID(pod *core.Pod) string { return pod.Namespace + "/" + pod.Name }

// IsParent reports whether a pod is to have a checkpoint. A pod that is being deleted isn't.
func IsParent(pod *core.Pod) bool {
	return pod.Annotations[Wanted] == "true" && pod.DeletionTimestamp == nil
}

// IsOwn reports whether a pod is one of the pod-checkpointer.
func IsOwn(pod *core.Pod) bool { return pod.Labels[AppLabel] == AppName }

// Manifest changes a parent to the static pod that replaces it, and returns the files that it
// needs, below dir. A static pod has no service account, and can't refer to other objects.
func Manifest(pod *core.Pod, dir string) (sources []Source, err error) {
	name, namespace, spec := pod.Name, pod.Namespace, &pod.Spec
	if name == "" || namespace == "" {
		return nil, errors.New("pod has no name or no namespace")
	}
	pod.TypeMeta = meta.TypeMeta{APIVersion: "v1", Kind: "Pod"}
	pod.ObjectMeta = meta.ObjectMeta{Name: name, Namespace: namespace, Labels: pod.Labels, Annotations: map[string]string{Of: name}}
	pod.Status = core.PodStatus{}
	// The kubelet would check the selectors, and doesn't know the labels of its node before
	// the API server runs.
	spec.NodeName, spec.NodeSelector, spec.Affinity, spec.TopologySpreadConstraints = "", nil, nil, nil
	spec.ServiceAccountName, spec.DeprecatedServiceAccount, spec.ImagePullSecrets = "", "", nil
	var volumes []core.Volume
	for _, v := range spec.Volumes {
		source, keep, err := localize(&v, filepath.Join(namespace, name), dir)
		if err != nil {
			return nil, fmt.Errorf("pod %s/%s: volume %s: %w", namespace, name, v.Name, err)
		}
		if source != nil {
			sources = append(sources, *source)
		}
		if keep {
			volumes = append(volumes, v)
			continue
		}
		for _, containers := range [][]core.Container{spec.InitContainers, spec.Containers} {
			for i := range containers {
				containers[i].VolumeMounts = slices.DeleteFunc(containers[i].VolumeMounts, func(m core.VolumeMount) bool { return m.Name == v.Name })
			}
		}
	}
	spec.Volumes = volumes
	return sources, nil
}

// localize changes a volume from a Secret or a ConfigMap to a directory on the node. A volume
// with a token of the service account isn't kept.
func localize(v *core.Volume, pod, dir string) (_ *Source, keep bool, err error) {
	var s Source
	var items []core.KeyToPath
	var optional *bool
	switch {
	case v.Projected != nil:
		if slices.ContainsFunc(v.Projected.Sources, func(s core.VolumeProjection) bool { return s.ServiceAccountToken != nil }) {
			return nil, false, nil
		}
		return nil, false, errors.New("a projected volume without a token can't be in a static pod: use a volume for each Secret and ConfigMap")
	case v.Secret != nil:
		s.Kind, s.Name, items, optional = "secrets", v.Secret.SecretName, v.Secret.Items, v.Secret.Optional
	case v.ConfigMap != nil:
		s.Kind, s.Name, items, optional = "configmaps", v.ConfigMap.Name, v.ConfigMap.Items, v.ConfigMap.Optional
	default:
		return nil, true, nil
	}
	s.Optional = optional != nil && *optional
	for _, item := range items {
		if s.Paths == nil {
			s.Paths = map[string]string{}
		}
		s.Paths[item.Key] = item.Path
	}
	s.Dir = filepath.Join(dir, s.Kind, pod, s.Name)
	v.VolumeSource = core.VolumeSource{HostPath: &core.HostPathVolumeSource{Path: s.Dir}}
	return &s, true, nil
}

// Files returns the files of a source, by name, from the values of the object's keys.
func (s Source) Files(values map[string][]byte) (map[string][]byte, error) {
	if s.Paths == nil {
		return values, nil
	}
	files := map[string][]byte{}
	for key, path := range s.Paths {
		value, found := values[key]
		switch {
		case !filepath.IsLocal(path):
			return nil, fmt.Errorf("path %q of key %q is outside of the volume", path, key)
		case found:
			files[path] = value
		case !s.Optional:
			return nil, fmt.Errorf("it has no key %q", key)
		}
	}
	return files, nil
}
