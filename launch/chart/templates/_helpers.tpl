{{- define "omni.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end -}}

{{- define "omni.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "omni.labels" -}}
{{ include "omni.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* The pod of rank 0. */}}
{{- define "omni.head" -}}
{{ printf "%s-%s-0" (include "omni.name" .) (first .Values.roles).name }}
{{- end -}}

{{- define "omni.pods" -}}
{{- $pods := 0 }}{{ range .Values.roles }}{{ $pods = add $pods .pods }}{{ end }}{{ $pods }}
{{- end -}}

{{/* The most pods there may be; each has a rank of its own. */}}
{{- define "omni.ranks" -}}
{{- $more := 0 }}{{ if .Values.autoscaling.enabled }}{{ $more = sub .Values.autoscaling.maxPods (last .Values.roles).pods }}{{ end }}
{{- add $more (include "omni.pods" . | int) }}
{{- end -}}

{{/* What values.schema.json cannot say. */}}
{{- define "omni.check" -}}
{{- if and .Values.pipeline .Values.pipelineConfigMap }}
{{- fail "pipeline and pipelineConfigMap are both given: leave one of them out." }}
{{- end }}
{{- if not (or .Values.pipeline .Values.pipelineConfigMap) }}
{{- fail "There is no pipeline: pass --set-file pipeline=pipeline.yaml, or name a ConfigMap with the key pipeline.yaml in pipelineConfigMap." }}
{{- end }}
{{- $names := list }}
{{- range .Values.roles }}
{{- if has .name $names }}{{ fail (printf "roles: two are called %q; give each a name of its own." .name) }}{{ end }}
{{- $names = append $names .name }}
{{- end }}
{{- if and (gt (int (include "omni.ranks" .)) 1) (not .Values.keys.secret) }}
{{- fail (printf "keys.secret: %s pods talk to each other over the network, which needs keys. Make them with `omni-actors keys` and name the secret." (include "omni.ranks" .)) }}
{{- end }}
{{- if .Values.autoscaling.enabled }}
{{- if not .Values.serviceMonitor.enabled }}{{ fail "autoscaling.enabled reads metrics from Prometheus: set serviceMonitor.enabled, too." }}{{ end }}
{{- if lt (int .Values.autoscaling.maxPods) (int (last .Values.roles).pods) }}{{ fail (printf "autoscaling.maxPods is less than the %d pods of the role %s." (int (last .Values.roles).pods) (last .Values.roles).name) }}{{ end }}
{{- end }}
{{- $own := list "HOME" "OMNI_ACTORS_API_KEY" "VLLM_CACHE_ROOT" "NODES" "FIRST_RANK" "HEAD" }}
{{- range $name, $value := .Values.env }}
{{- if has $name $own }}{{ fail (printf "env.%s: the chart sets this variable itself." $name) }}{{ end }}
{{- end }}
{{- end -}}
