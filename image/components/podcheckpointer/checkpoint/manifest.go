package checkpoint

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
)

// Annotations of parents and of checkpoints, and the label of the pod-checkpointer's pods.
const (
	Wanted   = "checkpointer.alpha.coreos.com/checkpoint"    // "true"
	Of       = "checkpointer.alpha.coreos.com/checkpoint-of" // the name of the parent
	AppLabel = "k8s-app"
	AppName  = "pod-checkpointer"
)

// Object is an object of Kubernetes, as decoded from JSON.
type Object = map[string]any

// A Source is a Secret or a ConfigMap whose files a checkpoint needs.
type Source struct {
	Kind     string // secrets or configmaps, as in paths of the API
	Name     string
	Optional bool
	// Paths are the names of the files by key; nil: each key is the name of its file.
	Paths map[string]string
	Dir   string // for the files
}

// Part returns the object in a field of another object; nil if there is none.
func Part(o Object, field string) Object {
	part, _ := o[field].(Object)
	return part
}

// Text returns the text in a field of an object.
func Text(o Object, field string) string {
	text, _ := o[field].(string)
	return text
}

// ID returns the ID of a pod.
func ID(pod Object) string {
	m := Part(pod, "metadata")
	return Text(m, "namespace") + "/" + Text(m, "name")
}

// IsParent reports whether a pod is to have a checkpoint. A pod that is being deleted isn't.
func IsParent(pod Object) bool {
	m := Part(pod, "metadata")
	return Text(Part(m, "annotations"), Wanted) == "true" && m["deletionTimestamp"] == nil
}

// IsOwn reports whether a pod is one of the pod-checkpointer.
func IsOwn(pod Object) bool {
	return Text(Part(Part(pod, "metadata"), "labels"), AppLabel) == AppName
}

// Manifest changes a parent to the static pod that replaces it, and returns the files that it
// needs, below dir. A static pod has no service account, and can't refer to other objects.
func Manifest(pod Object, dir string) ([]Source, error) {
	m, spec := Part(pod, "metadata"), Part(pod, "spec")
	name, namespace := Text(m, "name"), Text(m, "namespace")
	if name == "" || namespace == "" || spec == nil {
		return nil, errors.New("pod has no name, no namespace or no spec")
	}
	pod["apiVersion"], pod["kind"] = "v1", "Pod"
	pod["metadata"] = Object{"name": name, "namespace": namespace, "labels": m["labels"], "annotations": Object{Of: name}}
	delete(pod, "status")
	// The kubelet would check the selectors, and doesn't know the labels of its node before
	// the API server runs.
	for _, field := range []string{"serviceAccount", "serviceAccountName", "imagePullSecrets", "nodeName", "nodeSelector", "affinity", "topologySpreadConstraints"} {
		delete(spec, field)
	}
	var sources []Source
	var volumes []any
	for _, v := range objects(spec, "volumes") {
		source, keep, err := localize(v, func(kind, object string) string { return filepath.Join(dir, kind, namespace, name, object) })
		if err != nil {
			return nil, fmt.Errorf("pod %s/%s: volume %s: %w", namespace, name, Text(v, "name"), err)
		}
		if source != nil {
			sources = append(sources, *source)
		}
		if keep {
			volumes = append(volumes, v)
			continue
		}
		unmount(spec, Text(v, "name"))
	}
	spec["volumes"] = volumes
	return sources, nil
}

// objects returns the objects in a list.
func objects(o Object, field string) (all []Object) {
	list, _ := o[field].([]any)
	for _, item := range list {
		if object, ok := item.(Object); ok {
			all = append(all, object)
		}
	}
	return all
}

// localize changes a volume from a Secret or a ConfigMap to a directory on the node. A volume
// with a token of the service account isn't kept.
func localize(volume Object, dir func(kind, name string) string) (_ *Source, keep bool, err error) {
	if projected := Part(volume, "projected"); projected != nil {
		for _, source := range objects(projected, "sources") {
			if source["serviceAccountToken"] != nil {
				return nil, false, nil
			}
		}
		return nil, false, errors.New("a projected volume without a token can't be in a static pod: use a volume for each Secret and ConfigMap")
	}
	for _, from := range []struct{ field, name, kind string }{{"secret", "secretName", "secrets"}, {"configMap", "name", "configmaps"}} {
		part := Part(volume, from.field)
		if part == nil {
			continue
		}
		s := Source{Kind: from.kind, Name: Text(part, from.name), Dir: dir(from.kind, Text(part, from.name))}
		s.Optional, _ = part["optional"].(bool)
		for _, item := range objects(part, "items") {
			if s.Paths == nil {
				s.Paths = map[string]string{}
			}
			s.Paths[Text(item, "key")] = Text(item, "path")
		}
		delete(volume, from.field)
		volume["hostPath"] = Object{"path": s.Dir}
		return &s, true, nil
	}
	return nil, true, nil
}

// unmount removes the mounts of a volume.
func unmount(spec Object, volume string) {
	for _, field := range []string{"initContainers", "containers"} {
		for _, c := range objects(spec, field) {
			mounts, some := c["volumeMounts"].([]any)
			if !some {
				continue
			}
			c["volumeMounts"] = slices.DeleteFunc(mounts, func(m any) bool {
				mount, _ := m.(Object)
				return Text(mount, "name") == volume
			})
		}
	}
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
